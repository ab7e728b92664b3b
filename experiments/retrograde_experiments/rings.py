"""Fig. 5: four nested rings of two classes: a Momentum ResNet takes them apart, a ResNet of the same parameters does not.

    f(x) = W₂ᵀ tanh(W₁x + b), 16 hidden units, depth 15, every layer its own; v₀ = 0

The network maps the plane to itself; the larger of the two coordinates at its end is the class. Rings of radius 1.5, 3, 4.5 and 6
are 0.6 wide, classes alternate. Every step sees fresh points (Adam, one-cycle rate). The paper gives f and the depth; γ and the
optimiser are ours. W₂ starts divided by the depth and by 1−γ, and the rate is divided by 1−γ, so that both networks, which weigh f by
1−γ, start with steps of the same size, those of a discretised flow, and learn at the same pace. A flow of the plane cannot part
nested rings. With 15 layers that is no theorem: at larger rates the ResNet leaves the flow (docs/reproduce.md has numbers).
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
    steps: int = 2000
    points: int = 100  # per ring and step
    rate: float = 0.001  # of the ResNet; the Momentum ResNet's is 1/(1−γ) times that
    test_points: int = 1000  # per ring
    repeats: int = 5
    drawn: int = 60  # points per ring kept for the figure
    stride: int = 3  # layers between the clouds drawn

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(repeats=2)

    @classmethod
    def smoke(cls) -> Config:
        return cls(steps=20, points=50, repeats=1)

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, {self.hidden} hidden units, γ = {self.gamma:g}, {self.steps:,} Adam steps of rate "
            f"{self.rate:g}/(1−γ) on {RINGS} × {self.points} fresh points, tested on {RINGS} × {self.test_points}, "
            f"{self.repeats} seeds."
        )


class Branch(nn.Module):
    """f(x) = W₂ᵀ tanh(W₁x + b), with W₂ scaled at first."""

    def __init__(self, hidden: int, scale: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, hidden), nn.Linear(hidden, 2, bias=False)
        with torch.no_grad():
            self.outer.weight.mul_(scale)

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


def gamma_of(config: Config, unit: Key) -> float:
    return config.gamma if unit["net"] == "momentum" else 0.0


def build(config: Config, unit: Key) -> rg.MomentumNet:
    gamma = gamma_of(config, unit)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(unit["seed"])
        blocks = [Branch(config.hidden, 1 / (config.depth * (1 - gamma))) for _ in range(config.depth)]
    return rg.MomentumNet(blocks, gamma, memory="store")


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        net = build(config, unit)
        curve = train(net, config, unit, context)
        x, y = rings(config.drawn, seed=-1)
        with torch.no_grad():
            layers = range(config.stride, config.depth + 1, config.stride)
            cut = [rg.MomentumNet(list(net.blocks)[:k], float(net.gamma), memory="store")(x) for k in layers]
        return {
            "accuracy": accuracy(net, config), "parameters": sum(p.numel() for p in net.parameters()), "curve": curve,
            "clouds": [[[round(v, 3) for v in point] for point in cloud.tolist()] for cloud in (x, *cut)],
            "classes": "".join(map(str, y.tolist())),
        }  # fmt: skip


def train(net: rg.MomentumNet, config: Config, unit: Key, context: Context) -> list[float]:
    """The accuracy on the test points, at every twentieth of the training."""
    rate = config.rate / (1 - gamma_of(config, unit))
    optimizer = torch.optim.Adam(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=config.steps, pct_start=0.2)
    curve: list[float] = []
    state = context.checkpoint.load()
    if state is not None:
        restore(net, state["net"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        curve = state["curve"]
    first = 0 if state is None else state["step"]
    context.progress.steps(config.steps, first)
    for step in range(first, config.steps):
        if context.checkpoint.due():
            context.checkpoint.save({
                "step": step, "curve": curve, "net": state_of(net), "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            })  # fmt: skip
        x, y = rings(config.points, seed=1 + step + 1_000_000 * unit["seed"])
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, config.steps // 20) == 0:
            curve.append(accuracy(net, config))
        context.progress.step(f"loss {loss.item():.3f}")
    return curve


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
                ("≥ 99 % for every seed", min(shares) >= 99) if net == "momentum" else ("fails", max(shares) < 90)
            )
            found.append(Finding(f"test accuracy, {NAMES[net]}", text, target, met))
    sizes = {r["parameters"] for r in records}
    found.append(Finding("parameters of each", ", ".join(map(str, sorted(sizes))), "the same", len(sizes) == 1))
    return found
