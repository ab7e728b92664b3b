"""MiniLM-L6, a BERT that turns sentences into vectors, as a momentum network: whether sentences that mean the same stay near.

Refitting is distillation: the converted network learns to give the vectors that the plain one gave, on sentences of Shakespeare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Settings
from ..metrics import Key
from . import weights
from .prepare import partners
from .text import prepared_text
from .transfer import GAMMAS, as_momentum, fit, points, shares_of


@dataclass(frozen=True)
class Config(Settings):
    gammas: tuple[float, ...] = GAMMAS
    velocities: tuple[str, ...] = ("zero", "first")
    refit_gammas: tuple[float, ...] = (0.9, 0.5, 0.99, 0.7, 0.95, 0.3)
    warmup_gammas: tuple[float, ...] = (0.9, 0.5, 0.99, 0.7, 0.95)
    steps: int = 300
    batch: int = 64
    rate: float = 2e-4
    warm: float = 0.5
    sentences: int = 6000  # to train on; a twelfth as many to test with
    memory: str = "auto"
    seed: int = 0

    @classmethod
    def smoke(cls) -> Config:
        return cls((0.0, 0.9), ("zero",), (0.9,), (0.9,), steps=2, batch=4)

    @classmethod
    def small(cls) -> Config:
        """For a CPU: a few sentences and steps."""
        return cls((0.0, 0.5, 0.9), ("zero",), (0.9,), (0.9,), steps=5, batch=16, sentences=240)

    def setting(self) -> str:
        return (
            f"12 pairs of sentences, {self.sentences // 12} held-out sentences of Shakespeare; distillation: {self.steps} steps of "
            f"{self.batch} of {self.sentences} others, loss 1 − cosine, AdamW, rate {self.rate:g} falling to 0; warm-up: γ rises over "
            f"the first {100 * self.warm:.0f} %; one run each."
        )


def units(config: Config) -> list[Key]:
    return [
        *points(config.gammas, config.velocities, ["converted"]),
        *points(config.refit_gammas, ["zero"], ["refit"]),
        *points(config.warmup_gammas, ["zero"], ["warmup"]),
    ]


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    limits = {"train": config.sentences, "test": config.sentences // 12, "pair": None}
    held = prepared_text(root)
    text = {
        f"{name}_{kind}": held[f"{name}_{kind}"][:n].to(device)
        for name, n in limits.items()
        for kind in ("ids", "mask")
    }
    net = weights.minilm(root).to(device)
    groups = ("test", "pair") if unit["way"] == "converted" else ("train", "test", "pair")
    wanted = {name: vectors(net, text, name) for name in groups}
    as_momentum(net, unit["gamma"], unit["velocity"], config.memory)
    went: dict[str, Any] = {}
    if unit["way"] != "converted":
        optimizer = torch.optim.AdamW(net.parameters(), config.rate, weight_decay=0.0)

        def loss(chosen: Tensor) -> Tensor:
            mine = weights.embedded(net, text["train_ids"][chosen].long(), text["train_mask"][chosen].long())
            return 1 - (mine * wanted["train"][chosen]).sum(1).mean()

        went = fit(
            net, chosen(config, len(wanted["train"]), device), loss, optimizer, config.steps,
            shares_of(unit["way"], config.steps, config.warm), clip=1.0,
        )  # fmt: skip
    pairs = vectors(net, text, "pair")
    return {
        "cosine": float((vectors(net, text, "test") * wanted["test"]).sum(1).mean()),
        "partners": partners(pairs), "pairs": len(pairs) // 2,
        "order": spearman(similarities(pairs), similarities(wanted["pair"])),
        **went,
    }  # fmt: skip


def vectors(net: nn.Module, text: dict[str, Tensor], name: str) -> Tensor:
    """The vectors of a group of sentences."""
    parts = zip(text[f"{name}_ids"].split(500), text[f"{name}_mask"].split(500), strict=True)
    with torch.no_grad():
        return torch.cat([weights.embedded(net, ids.long(), mask.long()) for ids, mask in parts])


def chosen(config: Config, count: int, device: torch.device) -> Iterator[Tensor]:
    """Numbers of sentences, the same for the same seed."""
    draw = torch.Generator().manual_seed(config.seed)
    while True:
        yield torch.randint(count, (config.batch,), generator=draw).to(device)


def similarities(found: Tensor) -> Tensor:
    """Of all first sentences with all second ones."""
    left, right = found.chunk(2)
    return (left @ right.T).flatten()


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation: 1 where both have the same order.

    >>> spearman(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 5.0, 6.0]))
    1.0
    """
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 6)
