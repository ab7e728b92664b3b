"""ResNet-20 and ResNet-56 trained on CIFAR-10, as momentum networks: test accuracy over γ."""

from __future__ import annotations

import dataclasses
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
from ..data import Images, load
from ..data.batches import Resident
from ..metrics import Key
from . import weights
from .transfer import GAMMAS, WAYS, as_momentum, fit, placed, points, shares_of, statistics


@dataclass(frozen=True)
class Config(Settings):
    depths: tuple[int, ...] = (56, 20)
    gammas: tuple[float, ...] = GAMMAS
    velocities: tuple[str, ...] = ("zero", "first")
    refit_gammas: tuple[float, ...] = (0.0, 0.9, 0.5, 0.99, 0.7, 0.95, 0.3, 0.8, 0.1, 0.6)
    warmup_gammas: tuple[float, ...] = (0.9, 0.5, 0.99, 0.7, 0.95, 0.3, 0.8, 0.1)
    epochs: int = 2
    batch: int = 256
    rate: float = 0.05
    weight_decay: float = 1e-4
    warm: float = 0.5  # part of the refit over which γ rises
    batches: int = 20  # for the statistics of BatchNorm
    train_images: int = 50_000
    test_images: int = 10_000
    memory: str = "store"
    seed: int = 0

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            (14,),
            (0.0, 0.9),
            refit_gammas=(0.0, 0.9),
            warmup_gammas=(0.9,),
            epochs=1,
            batch=8,
            batches=2,
            train_images=16,
            test_images=20,
            memory="auto",
        )

    @classmethod
    def small(cls) -> Config:
        """For a CPU: part of the images, and one short refit."""
        return cls(
            (20,),
            (0.0, 0.5, 0.9),
            ("zero",),
            (0.0, 0.5, 0.9),
            (0.5, 0.9),
            epochs=1,
            batch=64,
            batches=4,
            train_images=640,
            test_images=500,
        )

    def setting(self) -> str:
        images = "all test images" if self.test_images == 10_000 else f"{self.test_images} test images"
        return (
            f"{images}; refit: {self.epochs} epochs of {self.train_images} images, SGD 0.9, batch {self.batch}, rate {self.rate:g} "
            f"falling to 0, weight decay {self.weight_decay:g}; warm-up: γ rises over the first {100 * self.warm:.0f} % of it; "
            f"statistics: {self.batches} batches of {self.batch}; one run each."
        )


def units(config: Config) -> list[Key]:
    found = [
        *points(config.gammas, config.velocities, WAYS[:2]),
        *points(config.refit_gammas, ["zero"], ["refit"]),
        *points(config.warmup_gammas, ["zero"], ["warmup"]),
    ]
    return [{"net": f"ResNet-{depth}", **point} for point in found for depth in config.depths]


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    source = batches(config, device, root)
    net = placed(weights.cifar_resnet(int(unit["net"].partition("-")[2]), root), device)
    example = torch.zeros(2, 3, 32, 32, device=device)
    as_momentum(net, unit["gamma"], unit["velocity"], config.memory, example)
    values: dict[str, Any] = {}
    if unit["way"] == "statistics":
        statistics(net, (x for x, _ in islice(source.epoch(0), config.batches)))
    elif unit["way"] != "converted":
        values = refitted(config, net, source, unit["way"], config.warm)
    return {**tested(net, source), **values}


@lru_cache(maxsize=1)
def batches(config: Config, device: torch.device, root: Path) -> Resident:
    """CIFAR-10 on the device, normalised as these networks were trained."""
    images = images_of(root)
    few = dataclasses.replace(
        images, train_x=images.train_x[: config.train_images], train_y=images.train_y[: config.train_images],
        test_x=images.test_x[: config.test_images], test_y=images.test_y[: config.test_images],
    )  # fmt: skip
    source = Resident(few, config.batch, seed=config.seed, device=device, test_batch=500)
    source.mean, source.std = (torch.tensor(v, device=device) for v in (weights.CIFAR_MEAN, weights.CIFAR_STD))
    return source


def images_of(root: Path) -> Images:
    return load("cifar10", root)


def refitted(config: Config, net: nn.Module, source: Resident, way: str, part: float) -> dict[str, Any]:
    """Train the network; how it went. `part`: of the steps, over which γ moves."""
    steps = config.epochs * source.steps

    def every() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(config.epochs):
            yield from source.epoch(epoch)

    optimizer = torch.optim.SGD(net.parameters(), config.rate, momentum=0.9, weight_decay=config.weight_decay)
    net.train()
    went = fit(
        net, every(), lambda batch: cross_entropy(net(batch[0]), batch[1]), optimizer, steps,
        shares_of(way, steps, part),
    )  # fmt: skip
    net.eval()
    return went


def tested(net: nn.Module, source: Resident) -> dict[str, float]:
    """Accuracy in % and mean loss on the test images."""
    right, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for x, y in source.test():
            out = net(x)
            right += int((out.argmax(1) == y).sum())
            loss += float(cross_entropy(out, y, reduction="sum"))
            count += len(y)
    return {"accuracy": 100 * right / count, "loss": loss / count}
