"""SmolLM2-135M, a Llama of 30 blocks, as a momentum network: perplexity on plays of Shakespeare that no refit has seen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..config import Settings
from ..metrics import Key
from . import weights
from .text import prepared_text
from .transfer import GAMMAS, as_momentum, fit, points, shares_of


@dataclass(frozen=True)
class Config(Settings):
    gammas: tuple[float, ...] = GAMMAS
    velocities: tuple[str, ...] = ("zero", "first")
    refit_gammas: tuple[float, ...] = (0.0, 0.9, 0.5, 0.99)
    steps: int = 300
    batch: int = 16
    length: int = 256
    rate: float = 2e-4
    warm: float = 0.5
    rows: int = 128  # of `length` tokens each, to test with
    memory: str = "auto"
    seed: int = 0

    @classmethod
    def smoke(cls) -> Config:
        return cls((0.0, 0.9), ("zero",), (0.9,), steps=2, batch=2, length=8, rows=2)

    @classmethod
    def small(cls) -> Config:
        """For a CPU: a page to test with, and a few steps."""
        return cls((0.0, 0.5, 0.9), ("zero",), (0.0, 0.9), steps=4, batch=2, length=64, rows=4)

    def setting(self) -> str:
        return (
            f"{self.rows} rows of {self.length} tokens of three held-out plays; refit: {self.steps} steps of {self.batch} rows of the "
            f"other plays, AdamW, rate {self.rate:g} falling to 0, float32 (TF32 on a GPU); warm-up: γ rises over the first "
            f"{100 * self.warm:.0f} %; one run each."
        )


def units(config: Config) -> list[Key]:
    return [
        *points(config.gammas, config.velocities, ["converted"]),
        *points(config.refit_gammas, ["zero"], ["refit", "warmup"]),
    ]


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    text = prepared_text(root)
    net = weights.smollm2(root).to(device)
    as_momentum(net, unit["gamma"], unit["velocity"], config.memory)
    went: dict[str, Any] = {}
    if unit["way"] != "converted":
        optimizer = torch.optim.AdamW(net.parameters(), config.rate, betas=(0.9, 0.95), weight_decay=0.0)
        net.train()
        went = fit(
            net, rows(config, text["train_tokens"], device), lambda batch: loss(net, batch), optimizer, config.steps,
            shares_of(unit["way"], config.steps, config.warm), clip=1.0,
        )  # fmt: skip
        net.eval()
    nats = tested(config, net, text["test_tokens"], device)
    return {"perplexity": math.exp(min(nats, 700.0)), "loss": nats, **went}


def rows(config: Config, tokens: Tensor, device: torch.device) -> Iterator[Tensor]:
    """Batches of rows from random places, the same for the same seed."""
    draw = torch.Generator().manual_seed(config.seed)
    offsets = torch.arange(config.length + 1)
    while True:
        places = torch.randint(len(tokens) - config.length, (config.batch, 1), generator=draw)
        yield tokens[places + offsets].long().to(device)


def loss(net: nn.Module, batch: Tensor, reduction: str = "mean") -> Tensor:
    """Of each token but the first, given those before it."""
    out = net(input_ids=batch[:, :-1], use_cache=False).logits
    return cross_entropy(out.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction=reduction)


def tested(config: Config, net: nn.Module, tokens: Tensor, device: torch.device) -> float:
    """Nats per token, over rows spread evenly over the held-out text."""
    starts = torch.linspace(0, len(tokens) - config.length - 1, config.rows).long()
    chosen = tokens[starts[:, None] + torch.arange(config.length + 1)].long().to(device)
    with torch.no_grad():
        total = sum(float(loss(net, part, "sum")) for part in chosen.split(config.batch))
    return total / (config.rows * config.length)
