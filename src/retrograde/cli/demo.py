"""`retrograde demo`: one residual network, trained three ways from the same weights on the same batches.

Every batch is one training step of each network, in turns, so the step times are those of the training itself and can be
compared. Memory is measured on the same networks after training: one more step, every allocation counted.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..memory import Times, measure
from ..nets.momentum import MomentumNet
from .digits import Checkpointed, Digits, Residual, branch, head, load_digits, stem

GAMMA = 0.9

WAYS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "plain": Residual,
    "checkpoint per block": Checkpointed,
    "momentum, in reverse": lambda blocks: MomentumNet(blocks, GAMMA, memory="reverse", verify="end"),
}
"""How the stack of residual blocks is run, by name; the first is what the others are compared with."""


@dataclass(frozen=True)
class Setting:
    """What the demo does. `depths`: where memory is measured besides."""

    epochs: int = 6
    depth: int = 32
    seed: int = 0
    batch: int = 64
    rate: float = 4e-3
    images: int | None = None
    depths: tuple[int, ...] = (8, 16, 32, 64)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.depth < 1:
            raise ValueError(f"epochs and depth must be at least 1; got epochs={self.epochs}, depth={self.depth}.")


def quick(setting: Setting) -> Setting:
    """The same in seconds: too short to learn much."""
    return replace(setting, epochs=min(setting.epochs, 2), depth=min(setting.depth, 4), images=256, depths=(4, 12))


@dataclass
class Result:
    """One way of training: its curves (one value per epoch), and what a step takes."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    peaks: dict[int, int] = field(default_factory=dict)

    @property
    def times(self) -> Times:
        return Times(tuple(self.seconds))


@dataclass(frozen=True)
class Outcome:
    setting: Setting
    results: dict[str, Result]


class Watcher(Protocol):
    """Is told how the training goes."""

    def planned(self, steps: int) -> None: ...
    def stepped(self, way: str, loss: float) -> None: ...
    def tested(self, way: str, accuracy: float) -> None: ...
    def measuring(self, depths: list[int]) -> None: ...


def run(setting: Setting, watcher: Watcher) -> Outcome:
    """Train and measure all three."""
    data = load_digits(setting.seed)
    networks = build(setting.depth, setting.seed)
    results = {way: Result() for way in networks}
    train(networks, results, data, setting, watcher)
    depths = sorted({*setting.depths, setting.depth})
    watcher.measuring(depths)
    x, y = data.train_x[: setting.batch], data.train_y[: setting.batch]
    for depth in depths:
        for way, network in (networks if depth == setting.depth else build(depth, setting.seed)).items():
            results[way].peaks[depth] = step_memory(network, x, y)
    for result in results.values():
        result.peak = result.peaks[setting.depth]
    return Outcome(setting, results)


def build(depth: int, seed: int) -> dict[str, nn.Module]:
    """The same network for each way of training it, down to the initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = stem(), [branch() for _ in range(depth)], head()
    networks: dict[str, nn.Module] = {}
    for way, stack in WAYS.items():
        first, blocks, last = copy.deepcopy(parts)
        networks[way] = nn.Sequential(first, stack(blocks), last)
    return networks


def train(
    networks: dict[str, nn.Module], results: dict[str, Result], data: Digits, setting: Setting, watcher: Watcher
) -> None:
    """All networks side by side: every batch is a step of each, in turns."""
    steps = setting.epochs * len(list(batches(data, setting, 0)))
    watcher.planned(steps)
    learners = {}
    for way, network in networks.items():
        optimizer = torch.optim.AdamW(network.parameters(), lr=setting.rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setting.rate, total_steps=steps, pct_start=0.25)
        learners[way] = optimizer, schedule
    for epoch in range(setting.epochs):
        losses: dict[str, list[float]] = {way: [] for way in networks}
        for x, y in batches(data, setting, epoch):
            for way, network in networks.items():
                start = time.perf_counter()
                losses[way].append(step(network, learners[way][0], x, y))
                results[way].seconds.append(time.perf_counter() - start)
                learners[way][1].step()
                watcher.stepped(way, losses[way][-1])
        for way, network in networks.items():
            results[way].loss.append(sum(losses[way]) / len(losses[way]))
            results[way].accuracy.append(accuracy(network, data))
            watcher.tested(way, results[way].accuracy[-1])


def batches(data: Digits, setting: Setting, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, the same for every network."""
    generator = torch.Generator().manual_seed(1000 * setting.seed + epoch)
    order = torch.randperm(len(data.train_x), generator=generator)[: setting.images]
    for chosen in order[: len(order) // setting.batch * setting.batch].split(setting.batch):
        yield data.train_x[chosen], data.train_y[chosen]


def step(network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One step of training; the loss before it."""
    optimizer.zero_grad()
    loss = F.cross_entropy(network(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(network: nn.Module, data: Digits) -> float:
    """Share of the test images named rightly."""
    network.eval()
    right = network(data.test_x).argmax(1) == data.test_y
    network.train()
    return float(right.float().mean())


def step_memory(network: nn.Module, x: Tensor, y: Tensor) -> int:
    """Peak memory of a training step beyond parameters, gradients and batch."""
    return measure(network, x, loss=lambda output: F.cross_entropy(output, y), repeats=1).peak
