"""Fig. 5: four nested rings of two classes: a Momentum ResNet takes them apart, a ResNet of the same parameters cannot.

    f(x) = W₂ᵀ tanh(W₁x + b₁) + b₂, 16 hidden units, the same at each of 15 layers; v₀ = 0

The network maps the plane to itself; the larger of the two coordinates at its end is the class. Rings of radius 1.5, 3, 4.5 and 6
are 0.6 wide, classes alternate. The paper gives f (without b₂) and the depth; the rings, tied weights and b₂ are as in the authors'
published example; γ and the optimiser are ours. Tied weights make for poor local minima, so each network, of either kind, is begun
several times, and the start with the least training loss after a short trial is trained on (Adam, one-cycle rate, clipped gradients,
fresh points every step).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg

from .checkpoint import restore, state_of
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context, one_thread
from .style import COLOURS, NAMES, canvas

NETS = ("resnet", "momentum")
RINGS = 4


@dataclass(frozen=True)
class Config:
    depth: int = 15
    hidden: int = 16
    gamma: float = 0.9
    steps: int = 6000
    points: int = 100  # per ring and step
    momentum_rate: float = 0.04
    resnet_rate: float = 0.01
    starts: int = 5
    trial: int = 300  # steps of each start
    test_points: int = 1000  # per ring
    repeats: int = 5
    drawn: int = 60  # points per ring kept for the figure
    stride: int = 3  # layers between the clouds drawn

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(steps=2000, repeats=2)

    @classmethod
    def smoke(cls) -> Config:
        return cls(steps=20, points=50, repeats=1, starts=2, trial=4)

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, tied weights, {self.hidden} hidden units, γ = {self.gamma:g}, the best of {self.starts} "
            f"starts by training loss after {self.trial} steps, then {self.steps:,} Adam steps on "
            f"{RINGS} × {self.points} fresh points, tested on {RINGS} × {self.test_points}, {self.repeats} seeds."
        )


class Branch(nn.Module):
    """f(x) = W₂ᵀ tanh(W₁x + b₁) + b₂."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, hidden), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def rings(points: int, seed: int) -> tuple[Tensor, Tensor]:
    """`points` points of each ring, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(RINGS, points, generator=generator)
    radius = 1.5 * torch.arange(1, RINGS + 1).unsqueeze(1) + 0.6 * torch.rand(RINGS, points, generator=generator)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(0, 1)
    return x, torch.arange(RINGS).repeat_interleave(points) % 2


def units(config: Config) -> list[Key]:
    return [{"net": net, "seed": seed} for seed in range(config.repeats) for net in NETS]


def build(config: Config, unit: Key, start: int) -> rg.MomentumNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * unit["seed"] + start)
        f = Branch(config.hidden)
    return rg.MomentumNet([f] * config.depth, config.gamma if unit["net"] == "momentum" else 0, memory="store")


class Learner:
    """A network in training: Adam on fresh points, with a rate that rises for a fifth of the steps and then falls."""

    def __init__(self, net: rg.MomentumNet, config: Config, unit: Key, steps: int) -> None:
        rate = config.momentum_rate if unit["net"] == "momentum" else config.resnet_rate
        self.net, self.points = net, config.points
        self.optimizer = torch.optim.Adam(net.parameters(), rate)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, total_steps=steps, pct_start=0.2)

    def step(self, seed: int) -> float:
        """One step on the points of that seed; the loss before it."""
        x, y = rings(self.points, seed)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {
            "net": state_of(self.net), "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        restore(self.net, state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        net, curve = train(config, unit, context)
        x, y = rings(config.drawn, seed=-1)
        with torch.no_grad():
            layers = range(config.stride, config.depth + 1, config.stride)
            cut = [rg.MomentumNet(list(net.blocks)[:k], float(net.gamma), memory="store")(x) for k in layers]
        return {
            "accuracy": accuracy(net, config), "parameters": sum(p.numel() for p in net.parameters()), "curve": curve,
            "clouds": [[[round(v, 3) for v in point] for point in cloud.tolist()] for cloud in (x, *cut)],
            "classes": "".join(map(str, y.tolist())),
        }  # fmt: skip


def begin(config: Config, unit: Key, context: Context) -> rg.MomentumNet:
    """The start with the least loss over the last fifth of a short trial. A kill within these begins them anew."""
    best: tuple[float, rg.MomentumNet] | None = None
    for start in range(config.starts):
        learner, losses = Learner(build(config, unit, start), config, unit, config.trial), []
        for step in range(config.trial):
            losses.append(learner.step(seed=_seed(unit, config.steps + start * config.trial + step)))
            context.progress.step(f"start {start + 1}, loss {losses[-1]:.3f}")
        late = losses[-max(1, config.trial // 5) :]
        loss = sum(late) / len(late)
        if best is None or loss < best[0]:
            best = loss, learner.net
    assert best is not None
    return best[1]


def train(config: Config, unit: Key, context: Context) -> tuple[rg.MomentumNet, list[float]]:
    """The trained network, and its accuracy on the test points at every twentieth of the training."""
    total, state = config.starts * config.trial + config.steps, context.checkpoint.load()
    context.progress.steps(total, 0 if state is None else total - config.steps + state["step"])
    net = begin(config, unit, context) if state is None else build(config, unit, 0)
    learner = Learner(net, config, unit, config.steps)
    first: int = 0
    curve: list[float] = []
    if state is not None:
        learner.restore(state["learner"])
        first, curve = state["step"], state["curve"]
    for step in range(first, config.steps):
        if context.checkpoint.due():
            context.checkpoint.save({"step": step, "curve": curve, "learner": learner.state()})
        loss = learner.step(seed=_seed(unit, step))
        if (step + 1) % max(1, config.steps // 20) == 0:
            curve.append(accuracy(net, config))
        context.progress.step(f"loss {loss:.3f}")
    return net, curve


def _seed(unit: Key, step: int) -> int:
    return 1 + step + 1_000_000 * unit["seed"]


@torch.no_grad()
def accuracy(net: nn.Module, config: Config) -> float:
    x, y = rings(config.test_points, seed=0)
    return float((net(x).argmax(1) == y).double().mean())


def figure(config: Config, records: list[Record]) -> Any:
    """Seed 0: the points at layers 0, 3, 6, …, and the curves of all seeds."""
    columns = config.depth // config.stride + 1
    picture, axes = canvas(1.75 * columns + 3, 3.9, 2, columns + 1, width_ratios=[1] * columns + [1.5])
    for row, net in enumerate(NETS):
        shown = next((r for r in records if r["net"] == net), None)
        for k in range(columns):
            panel = axes[row, k]
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set(visible=True, color="#d1d5db")
            if row == 0:
                panel.set_title(f"layer {k * config.stride}")
            if shown is None:
                continue
            cloud = torch.tensor(shown["clouds"][k])
            ring = torch.arange(RINGS).repeat_interleave(config.drawn)
            for i, colour in enumerate(("#ea580c", "#2563eb", "#f59e0b", "#0ea5e9")):
                panel.scatter(*cloud[ring == i].t().tolist(), s=5, color=colour, linewidths=0)
        axes[row, 0].set_ylabel(NAMES[net])
        panel = axes[row, columns]
        for record in (r for r in records if r["net"] == net):
            steps = [(i + 1) * max(1, config.steps // 20) for i in range(len(record["curve"]))]
            panel.plot(steps, record["curve"], color=COLOURS[net], lw=1.3)
        panel.set(ylim=(0.45, 1.02), title="test accuracy" if row == 0 else "", xlabel="step" if row else "")
        panel.grid(axis="y", alpha=0.25)
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for net in NETS:
        shares = [100 * r["accuracy"] for r in records if r["net"] == net]
        if shares:
            text = f"{spread(shares, '.1f', ' %')} (worst {min(shares):.1f}, best {max(shares):.1f})"
            target, met = (
                ("≥ 99 % for every seed", min(shares) >= 99) if net == "momentum" else ("fails", max(shares) < 97)
            )
            found.append(Finding(f"test accuracy, {NAMES[net]}", text, target, met))
    sizes = {r["parameters"] for r in records}
    found.append(Finding("parameters of each", ", ".join(map(str, sorted(sizes))), "the same", len(sizes) == 1))
    return found
