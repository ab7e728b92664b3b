"""`retrograde demo`: one residual network, trained three ways from the same weights on the same batches.

    x ← stem(image)      x ← x + f_k(x), k = 1…depth      class ← head(x)        f = conv-bn-relu-conv-bn

The data are the 1,797 handwritten digits that come with scikit-learn, 8×8 pixels in 17 grey levels. Every batch is one training
step of each network in turn, so the step times are those of the training itself and can be compared. Memory is measured on the
same networks after training: one more step, every allocation counted.
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
from torch.utils.checkpoint import checkpoint

from ..extras import require
from ..memory import Times, measure
from ..nets.momentum import MomentumNet

GAMMA, WIDTH = 0.9, 16


class Residual(nn.Module):
    """x ← x + f(x) for each block, keeping every activation."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Checkpointed(Residual):
    """The same, keeping each block's input and running the block again for its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


WAYS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "plain": Residual,
    "checkpoint per block": Checkpointed,
    "momentum, in reverse": lambda blocks: MomentumNet(blocks, GAMMA, memory="reverse", verify="strict"),
}
"""How the stack of residual blocks is run, by name. The others are compared with the first."""


@dataclass(frozen=True)
class Setting:
    """What the demo does. `depths`: where memory is measured as well."""

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
    """The same in seconds: a network of 4 blocks, which learns nearly all of the digits."""
    return replace(setting, epochs=min(setting.epochs, 3), depth=min(setting.depth, 4), depths=(4, 12))


@dataclass(frozen=True)
class Digits:
    """Images (count, 1, 8, 8) in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass
class Result:
    """One way of training: its curves (one value per epoch), and what a step takes."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    resident: int | None = None
    peaks: dict[int, int] = field(default_factory=dict)  # by depth

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


def check_packages() -> None:
    """Raise ModuleNotFoundError now if one of the packages is missing that are used after minutes of training."""
    for name in ("matplotlib", "sklearn"):
        require(name)


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
            measured = measure(network, x, loss=lambda output: F.cross_entropy(output, y), repeats=1)
            results[way].peaks[depth] = measured.peak
            if depth == max(depths):
                results[way].resident = measured.resident
    for result in results.values():
        result.peak = result.peaks[setting.depth]
    return Outcome(setting, results)


def load_digits(seed: int) -> Digits:
    """The digits, one in five set aside for testing."""
    data = require("sklearn.datasets").load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([len(x) // 5])
    return Digits(x[train], y[train], x[test], y[test])


def build(depth: int, seed: int) -> dict[str, nn.Module]:
    """The same network for each way of training it, down to the initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stem = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), _norm(), nn.ReLU())
        blocks = [_branch() for _ in range(depth)]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 10))
    networks: dict[str, nn.Module] = {}
    for way, stack in WAYS.items():
        first, between, last = copy.deepcopy((stem, blocks, head))
        networks[way] = nn.Sequential(first, stack(between), last)
    return networks


def _branch() -> nn.Module:
    """f. The scale of its last norm is small at first, so that a deep stack trains from the first step."""
    last = _norm()
    nn.init.constant_(last.weight, 0.2)
    inner, outer = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
    return nn.Sequential(inner, _norm(), nn.ReLU(), outer, last)


def _norm() -> nn.BatchNorm2d:
    # An epoch has few steps, and the statistics for evaluation must keep up with the weights.
    return nn.BatchNorm2d(WIDTH, momentum=0.3)


def train(
    networks: dict[str, nn.Module], results: dict[str, Result], data: Digits, setting: Setting, watcher: Watcher
) -> None:
    """All networks side by side: every batch is a step of each, in turn."""
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
                optimizer, schedule = learners[way]
                start = time.perf_counter()
                losses[way].append(step(network, optimizer, x, y))
                results[way].seconds.append(time.perf_counter() - start)
                schedule.step()
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
    """The fraction of test images that are classified correctly."""
    network.eval()
    right = network(data.test_x).argmax(1) == data.test_y
    network.train()
    return float(right.float().mean())
