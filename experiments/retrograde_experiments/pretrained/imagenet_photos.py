"""The ImageNet ResNet-50 as a momentum network: what it sees in photographs, and fine-tuned on ants and bees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..config import Settings
from ..data.folder import FolderBatches, load_folders
from ..data.weights import MEAN, STD
from ..metrics import Key
from . import weights
from .photos import categories, prepared_photos
from .prepare import as_input
from .transfer import as_momentum, fit, placed, points, shares_of, statistics

TASKS = ("photos", "hymenoptera")


@dataclass(frozen=True)
class Config(Settings):
    gammas: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    velocities: tuple[str, ...] = ("zero", "first")
    tune_gammas: tuple[float, ...] = (0.0, 0.5, 0.9)
    tune_velocities: tuple[str, ...] = ("zero",)
    epochs: int = 8
    batch: int = 16
    size: int = 224
    rate: float = 5e-3
    warm: float = 0.5
    memory: str = "auto"
    seeds: int = 3

    @classmethod
    def smoke(cls) -> Config:
        return cls((0.0, 0.9), ("zero",), (0.0, 0.9), ("zero",), epochs=1, batch=4, size=32, seeds=1)

    @classmethod
    def small(cls) -> Config:
        """For a CPU: small images, one epoch."""
        return cls(
            (0.0, 0.5, 0.9), ("zero",), tune_gammas=(0.0, 0.9), tune_velocities=("zero",), epochs=1, size=64, seeds=1
        )

    def setting(self) -> str:
        return (
            f"photographs at 224×224; hymenoptera (244 images to train on, 153 to test) at {self.size}×{self.size}: {self.epochs} "
            f"epochs of SGD 0.9, batch {self.batch}, rate {self.rate:g} falling to 0, all layers; γ = 0 is the plain network, "
            f"fine-tuned; warm-up: γ rises over the first {100 * self.warm:.0f} %; mean of {self.seeds} run{'s' * (self.seeds > 1)}."
        )


def units(config: Config) -> list[Key]:
    tuned = points(config.tune_gammas, config.tune_velocities, ["refit", "warmup"])
    return [
        *({"task": "photos", **point} for point in points(config.gammas, config.velocities, ["converted"])),
        *({"task": "hymenoptera", **point, "seed": seed} for seed in range(config.seeds) for point in tuned),
    ]


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    net = placed(weights.resnet50(root), device)
    if unit["task"] == "hymenoptera":
        return tuned(config, net, unit, device, root)
    as_momentum(net, unit["gamma"], unit["velocity"], config.memory)
    return seen(net, device, root)


def seen(net: nn.Module, device: torch.device, root: Path) -> dict[str, Any]:
    """Of every photograph: the most likely class, its probability, and the rank of the plain network's class."""
    names, pixels = prepared_photos(root)
    x = as_input(pixels.to(device))
    with torch.no_grad():
        plain = weights.resnet50(root).to(device)(x).argmax(1)
        likely = net(x).softmax(1)
    ranks = (likely > likely.gather(1, plain[:, None])).sum(1) + 1
    best, labels = likely.max(1), categories()
    return {
        "top1": float((ranks == 1).sum()), "top5": float((ranks <= 5).sum()), "count": len(names),
        "photos": {
            name: {"says": labels[k], "probability": round(float(p), 4), "plain": labels[m], "rank": int(rank)}
            for name, k, p, m, rank in zip(names, best.indices, best.values, plain, ranks, strict=True)
        },
    }  # fmt: skip


def tuned(config: Config, net: Any, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    """Fine-tune on hymenoptera with a new last layer: accuracy in % before, after each epoch, and at the end."""
    source = folders(config, unit["seed"], device, root)
    torch.manual_seed(unit["seed"])
    net.fc = nn.Linear(net.fc.in_features, source.classes).to(device)
    as_momentum(net, unit["gamma"], unit["velocity"], config.memory)
    steps, curve = config.epochs * source.steps, list[float]()

    def every() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(config.epochs):
            yield from source.epoch(epoch)
            if epoch + 1 < config.epochs:
                curve.append(accuracy(net, source))
                net.train()

    optimizer = torch.optim.SGD(net.parameters(), config.rate, momentum=0.9, weight_decay=1e-4)
    net.train()
    went = fit(
        net, every(), lambda batch: cross_entropy(net(batch[0]), batch[1]), optimizer, steps,
        shares_of(unit["way"], steps, config.warm),
    )  # fmt: skip
    running = accuracy(net, source)
    # a hundred steps are few for the running means of BatchNorm, which lag behind weights that move
    statistics(net, (x for x, _ in islice(source.epoch(config.epochs), source.steps)))
    return {"accuracy": accuracy(net, source), "running": running, "curve": [*curve, running], **went}


def accuracy(net: nn.Module, source: FolderBatches) -> float:
    """In %, on the test images, in eval mode."""
    net.eval()
    with torch.no_grad():
        right = [(net(x).argmax(1) == y).sum() for x, y in source.test()]
    return 100 * float(sum(right)) / len(source.folders.val)


@lru_cache(maxsize=1)
def folders(config: Config, seed: int, device: torch.device, root: Path) -> FolderBatches:
    """Ants and bees, less the mean that ResNet-50 was trained with."""
    source = FolderBatches(
        load_folders("hymenoptera", root), config.batch, size=config.size, seed=seed, device=device, test_batch=51
    )
    source.mean, source.std = (torch.tensor(values, device=device) for values in (MEAN, STD))
    return source
