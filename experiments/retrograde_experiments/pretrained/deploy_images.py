"""Networks for images, fine-tuned in reverse at one γ, then used as themselves and, by `rg.revert`, as the plain network again.

hymenoptera   ResNet-50 on ants and bees: accuracy in %
cifar         ResNet-56 on CIFAR-10: accuracy in %
scratch       ResNet-20 on CIFAR-10, from random weights: accuracy in %

BatchNorm's statistics are estimated anew before either test, and for the plain network (γ = 0, never converted) likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..config import Settings
from ..metrics import Key
from . import cifar_transfer, imagenet_photos, weights
from .cifar_resnet import CifarResNet
from .deploy import GAMMAS
from .transfer import FALL, deployed, fit, placed, plain_again, shares_of, statistics, to_be_plain, with_seed


@dataclass(frozen=True)
class Config(Settings):
    gammas: tuple[float, ...] = GAMMAS
    ways: tuple[str, ...] = ("kept",)  # or falling, or sign: see `transfer`
    seeds: int = 3
    memory: str = "reverse"
    photo_epochs: int = 8
    photo_batch: int = 16
    photo_size: int = 224
    photo_rate: float = 5e-3
    cifar_depth: int = 56
    cifar_epochs: int = 2
    cifar_batch: int = 256
    cifar_rate: float = 0.05
    cifar_train: int = 50_000
    cifar_test: int = 10_000
    scratch_depth: int = 20
    scratch_epochs: int = 10
    scratch_rate: float = 0.1
    scratch_gammas: tuple[float, ...] = (0.0, 1 / 8, 0.9)

    @classmethod
    def small(cls) -> Config:
        """For a CPU: two values of γ, part of the images."""
        return cls(
            (0.0, 1 / 8), seeds=1, photo_epochs=1, photo_size=64, cifar_depth=20, cifar_epochs=1, cifar_batch=64, cifar_train=640,
            cifar_test=500, scratch_epochs=1,
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            (0.0, 1 / 8, 0.9), ("kept", "falling"), 1, photo_epochs=1, photo_batch=4, photo_size=32, cifar_depth=14, cifar_epochs=1,
            cifar_batch=8, cifar_train=16, cifar_test=20, scratch_depth=14, scratch_epochs=1, scratch_gammas=(0.0, 1 / 8),
        )  # fmt: skip

    def setting(self) -> str:
        return (
            f"hymenoptera: {self.photo_epochs} epochs, batch {self.photo_batch}, SGD 0.9, rate {self.photo_rate:g} falling to 0; "
            f"CIFAR-10: {self.cifar_epochs} epochs, batch {self.cifar_batch}, SGD 0.9, rate {self.cifar_rate:g} falling to 0; "
            f"from scratch: {self.scratch_epochs} epochs, rate {self.scratch_rate:g}; float32 "
            f"(TF32 on a GPU), memory={self.memory!r}, {self.seeds} seed(s); BatchNorm's statistics estimated anew before every test."
        )

    def of_photos(self) -> imagenet_photos.Config:
        return imagenet_photos.Config(
            epochs=self.photo_epochs, batch=self.photo_batch, size=self.photo_size, rate=self.photo_rate
        )

    def of_cifar(self, unit: Key) -> cifar_transfer.Config:
        epochs, rate = (
            (self.scratch_epochs, self.scratch_rate)
            if unit["task"] == "scratch"
            else (self.cifar_epochs, self.cifar_rate)
        )
        return cifar_transfer.Config(
            epochs=epochs, batch=self.cifar_batch, rate=rate, train_images=self.cifar_train,
            test_images=self.cifar_test, seed=unit["seed"],
        )  # fmt: skip


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    for task, gammas in (("hymenoptera", config.gammas), ("cifar", config.gammas), ("scratch", config.scratch_gammas)):
        points = deployed(gammas, config.ways)
        found += [{"task": task, **with_seed(point, seed)} for point in points for seed in range(config.seeds)]
    return found


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    return (_photos if unit["task"] == "hymenoptera" else _cifar)(config, unit, device, root)


def _photos(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    setting = config.of_photos()
    source = imagenet_photos.folders(setting, unit["seed"], device, root)
    net = placed(weights.resnet50(root), device)
    torch.manual_seed(unit["seed"])
    net.fc = nn.Linear(net.fc.in_features, source.classes).to(device)
    to_be_plain(net, unit, config.memory)

    def every() -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(config.photo_epochs):
            yield from source.epoch(epoch)

    def accuracy() -> float:
        # a hundred steps are few for the running means of BatchNorm, which lag behind weights that move
        statistics(net, (x for x, _ in islice(source.epoch(config.photo_epochs), source.steps)))
        return imagenet_photos.accuracy(net, source)

    optimizer = torch.optim.SGD(net.parameters(), config.photo_rate, momentum=0.9, weight_decay=1e-4)
    net.train()
    steps = config.photo_epochs * source.steps
    shares = shares_of(unit.get("way", "kept"), steps, FALL)
    went = fit(net, every(), lambda batch: cross_entropy(net(batch[0]), batch[1]), optimizer, steps, shares)
    own = accuracy()
    plain_again(net, unit)
    return {"own": own, "plain": accuracy(), **went}


def _cifar(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    setting = config.of_cifar(unit)
    source = cifar_transfer.batches(setting, device, root)
    torch.manual_seed(unit["seed"])
    scratch = unit["task"] == "scratch"
    made = CifarResNet(config.scratch_depth) if scratch else weights.cifar_resnet(config.cifar_depth, root)
    net = placed(made, device)
    to_be_plain(net, unit, config.memory, torch.zeros(2, 3, 32, 32, device=device))

    def accuracy() -> float:
        statistics(net, (x for x, _ in islice(source.epoch(0), setting.batches)))
        net.eval()
        return cifar_transfer.tested(net, source)["accuracy"]

    before = cifar_transfer.tested(net, source)["accuracy"]
    went = cifar_transfer.refitted(setting, net, source, unit.get("way", "kept"), FALL)
    own = accuracy()
    plain_again(net, unit)
    return {**({} if scratch else {"before": before}), "own": own, "plain": accuracy(), **went}
