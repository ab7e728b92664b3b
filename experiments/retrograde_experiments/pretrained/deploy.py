"""Fine-tuned in reverse at one γ, then used as itself and, by `rg.revert`, as the plain network again.

language      SmolLM2-135M on Shakespeare: perplexity on plays it has not been trained on
hymenoptera   ResNet-50 on ants and bees: accuracy in %
cifar         ResNet-56 on CIFAR-10: accuracy in %
memory        SmolLM2-135M: peak memory and time of a training step, plain, checkpointed layer by layer, and in reverse at each γ

Steps, rates and batches are the same for every γ; γ = 0 is the plain network, never converted.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from ..metrics import Key
from . import cifar_transfer, imagenet_photos, language, weights
from .text import prepared_text
from .transfer import as_momentum, fit, placed, statistics

GAMMAS = (0.0, 1 / 8, 1 / 2, 1 / 16, 1 / 4, 0.9)  # a run cut short has the telling ones
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNK = 256  # tokens whose logits are in memory at a time when memory is measured


@dataclass(frozen=True)
class Config:
    tasks: tuple[str, ...] = ("memory", "language", "hymenoptera", "cifar")
    gammas: tuple[float, ...] = GAMMAS
    seeds: int = 3
    memory: str = "reverse"
    steps: int = 300
    batch: int = 16
    length: int = 256
    rate: float = 2e-4
    rows: int = 128
    measured_batch: int = 8
    measured_length: int = 1024
    measured_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    repeats: int = 5
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

    @classmethod
    def default(cls) -> Config:
        return cls()

    @classmethod
    def small(cls) -> Config:
        """For a CPU: two values of γ, a few steps each."""
        return cls(
            ("memory", "language"), (0.0, 1 / 8, 0.9), 1, steps=4, batch=2, length=64, rows=4, measured_batch=1,
            measured_length=128, measured_dtypes=("float32",), repeats=2,
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            gammas=(0.0, 1 / 8), seeds=1, steps=2, batch=2, length=8, rows=2, measured_batch=1, measured_length=16,
            measured_dtypes=("float32",), repeats=1, photo_epochs=1, photo_batch=4, photo_size=32, cifar_depth=14,
            cifar_epochs=1, cifar_batch=8, cifar_train=16, cifar_test=20,
        )  # fmt: skip

    def setting(self) -> str:
        return (
            f"language: {self.steps} steps of {self.batch} rows of {self.length} tokens, AdamW, rate {self.rate:g} falling to 0, "
            f"tested on {self.rows} rows; hymenoptera: {self.photo_epochs} epochs, batch {self.photo_batch}, SGD 0.9, rate "
            f"{self.photo_rate:g} falling to 0; cifar: {self.cifar_epochs} epochs, batch {self.cifar_batch}, SGD 0.9, rate "
            f"{self.cifar_rate:g} falling to 0; float32 (TF32 on a GPU), memory={self.memory!r}, {self.seeds} seed(s). Memory: a step of "
            f"{self.measured_batch} rows of {self.measured_length} tokens, above parameters and gradients; the logits of {CHUNK} tokens at "
            f"a time, for every method."
        )

    def of_language(self, seed: int) -> language.Config:
        return language.Config(
            steps=self.steps, batch=self.batch, length=self.length, rate=self.rate, rows=self.rows, seed=seed
        )

    def of_photos(self) -> imagenet_photos.Config:
        return imagenet_photos.Config(
            epochs=self.photo_epochs, batch=self.photo_batch, size=self.photo_size, rate=self.photo_rate
        )

    def of_cifar(self, seed: int) -> cifar_transfer.Config:
        return cifar_transfer.Config(
            epochs=self.cifar_epochs, batch=self.cifar_batch, rate=self.cifar_rate, train_images=self.cifar_train,
            test_images=self.cifar_test, seed=seed,
        )  # fmt: skip


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    if "memory" in config.tasks:
        for dtype in config.measured_dtypes:
            found += [{"task": "memory", "dtype": dtype, "method": method, "gamma": 0.0} for method in BASELINES]
            found += [{"task": "memory", "dtype": dtype, "method": "reverse", "gamma": g} for g in config.gammas if g]
    tuned = [task for task in config.tasks if task != "memory"]
    for task in tuned:
        found += [{"task": task, "gamma": g, "seed": seed} for seed in range(config.seeds) for g in config.gammas]
    return found


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    return TASKS[unit["task"]](config, unit, device, root)


def tuned_language(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    text, setting = prepared_text(root), config.of_language(unit["seed"])
    net = weights.smollm2(root).to(device)
    _converted(net, unit["gamma"], config.memory)

    def perplexity() -> float:
        net.eval()
        return math.exp(min(language.tested(setting, net, text["test_tokens"], device), 700.0))

    before = perplexity()
    optimizer = torch.optim.AdamW(net.parameters(), config.rate, betas=(0.9, 0.95), weight_decay=0.0)
    net.train()
    batches = language.rows(setting, text["train_tokens"], device)
    went = fit(net, batches, lambda batch: language.loss(net, batch), optimizer, config.steps, clip=1.0)
    own = perplexity()
    _reverted(net, unit["gamma"])
    return {"before": before, "own": own, "plain": perplexity(), **went}


def tuned_photos(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    setting = config.of_photos()
    source = imagenet_photos.folders(setting, unit["seed"], device, root)
    net = placed(weights.resnet50(root), device)
    torch.manual_seed(unit["seed"])
    net.fc = nn.Linear(net.fc.in_features, source.classes).to(device)
    _converted(net, unit["gamma"], config.memory)

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
    went = fit(net, every(), lambda batch: cross_entropy(net(batch[0]), batch[1]), optimizer, steps)
    own = accuracy()
    _reverted(net, unit["gamma"])
    return {"own": own, "plain": accuracy(), **went}


def tuned_cifar(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    setting = config.of_cifar(unit["seed"])
    source = cifar_transfer.batches(setting, device, root)
    net = placed(weights.cifar_resnet(config.cifar_depth, root), device)
    _converted(net, unit["gamma"], config.memory, torch.zeros(2, 3, 32, 32, device=device))

    def accuracy() -> float:
        statistics(net, (x for x, _ in islice(source.epoch(0), setting.batches)))
        net.eval()
        return cifar_transfer.tested(net, source)["accuracy"]

    before = cifar_transfer.tested(net, source)["accuracy"]
    went = cifar_transfer.refitted(setting, net, source, "refit")
    own = accuracy()
    _reverted(net, unit["gamma"])
    return {"before": before, "own": own, "plain": accuracy(), **went}


def _converted(net: nn.Module, gamma: float, memory: str, example: Any = None) -> None:
    if gamma:
        as_momentum(net, gamma, "zero", memory, example)


def _reverted(net: nn.Module, gamma: float) -> None:
    if gamma:
        rg.revert(net)


def cost_of_a_step(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    """Peak memory in bytes above parameters and gradients (None on a CPU), and the median time of a step in seconds."""
    net: Any = weights.smollm2(root).to(device, DTYPES[unit["dtype"]])
    if unit["method"] == "checkpoint":
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _converted(net, unit["gamma"], "reverse")
    setting = dataclasses.replace(
        config.of_language(0), batch=config.measured_batch, length=config.measured_length
    )
    batches = language.rows(setting, prepared_text(root)["train_tokens"], device)
    net.train()

    def step() -> float:
        batch = next(batches)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        _wait(device)
        begun = time.perf_counter()
        loss_in_chunks(net, batch).backward()
        _wait(device)
        return time.perf_counter() - begun

    for _ in range(2):  # gradients, workspaces, the fixed-point range
        step()
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [step() for _ in range(config.repeats)]
    peak = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else None
    return {"peak": peak, "seconds": median(seconds)}


def loss_in_chunks(net: Any, batch: Tensor) -> Tensor:
    """`language.loss`, with the logits of a few tokens at a time: those of all would be most of the memory."""
    hidden = net.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    wanted = batch[:, 1:].flatten()

    def part(hidden: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(net.lm_head(hidden).float(), wanted, reduction="sum")

    pairs = zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True)
    losses: list[Tensor] = [checkpoint(part, h, y, use_reentrant=False) for h, y in pairs]  # type: ignore[misc]
    return torch.stack(losses).sum() / len(wanted)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


BASELINES = ("plain", "checkpoint")
TASKS: dict[str, Callable[[Config, Key, torch.device, Path], dict[str, Any]]] = {
    "memory": cost_of_a_step, "language": tuned_language, "hymenoptera": tuned_photos, "cifar": tuned_cifar,
}  # fmt: skip
