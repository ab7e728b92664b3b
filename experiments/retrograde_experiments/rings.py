"""Fig. 5: four nested rings of two classes: a Momentum ResNet takes them apart, a ResNet of the same parameters does not.

    f(x) = W₂ᵀ tanh(W₁x + b), 16 hidden units, depth 15, every layer its own; v₀ = 0

The network maps the plane to itself; the larger of the two coordinates at its end is the class. Rings of radius 1.5, 3, 4.5 and 6
are 0.6 wide, classes alternate. Every step sees fresh points (Adam, one-cycle rate). The paper gives f and the depth; γ and the
optimiser are ours. W₂ starts divided by the depth and by 1−γ, and the rate is divided by 1−γ, so that both networks, which weigh f by
1−γ, start with steps of the same size, those of a discretised flow, and learn at the same pace. A flow of the plane cannot part
nested rings. With 15 layers that is no theorem, so a third network, "fast", is the ResNet at a higher rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg

from .config import Settings
from .findings import Finding, compared, spread
from .loop import steps
from .metrics import Key, Record
from .run import Context, one_thread
from .style import BLUE, COLOURS, NAMES, ORANGE, SKY, YELLOW, canvas

NETS = ("resnet", "momentum", "fast")
RINGS = 4
SEEN = 20  # accuracies in a learning curve


@dataclass(frozen=True)
class Config(Settings):
    depth: int = 15
    hidden: int = 16
    gamma: float = 0.9
    steps: int = 2000
    points: int = 100  # per ring and step
    rate: float = 0.001  # of the ResNet; the Momentum ResNet's is 1/(1−γ) times that
    fast: float = 10.0  # times the rate: of the third network
    test_points: int = 1000  # per ring
    repeats: int = 5
    drawn: int = 60  # points per ring kept for the figure
    stride: int = 3  # layers between the clouds drawn

    @classmethod
    def default(cls) -> Config:
        return cls(repeats=3)

    @classmethod
    def smoke(cls) -> Config:
        return cls(steps=20, points=50, repeats=1)

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, {self.hidden} hidden units, γ = {self.gamma:g}, {self.steps:,} Adam steps of rate "
            f"{self.rate:g}/(1−γ), for a second ResNet {self.fast:g} times that, on {RINGS} × {self.points} fresh points, tested on "
            f"{RINGS} × {self.test_points}, {self.repeats} seeds."
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
    rate = config.rate / (1 - gamma_of(config, unit)) * (config.fast if unit["net"] == "fast" else 1)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=config.steps, pct_start=0.2)
    curve: list[float] = []
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule}
    for step in steps(context, config.steps, parts, {"curve": curve}):
        x, y = rings(config.points, seed=1 + step + 1_000_000 * unit["seed"])
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, config.steps // SEEN) == 0:
            curve.append(accuracy(net, config))
    return curve


@torch.no_grad()
def accuracy(net: nn.Module, config: Config) -> float:
    x, y = rings(config.test_points, seed=0)
    return float((net(x).argmax(1) == y).double().mean())


def figure(config: Config, records: list[Record]) -> Any:
    """Seed 0: the points at layers 0, 3, 6, …, with the line of decision at the last; then the curves of all seeds."""
    columns = config.depth // config.stride + 1
    picture, axes = canvas(1.6 * columns + 2.6, 5.4, len(NETS), columns + 1, width_ratios=[1] * columns + [1.6])
    for row, net in zip(axes, NETS, strict=True):
        shown = next((r for r in records if r["net"] == net), None)
        for k, panel in enumerate(row[:columns]):
            panel.set(xticks=[], yticks=[])
            for spine in panel.spines.values():
                spine.set(visible=True, color="#d1d5db")
            if net == NETS[0]:
                panel.set_title("input" if not k else f"layer {k * config.stride}")
            if shown is not None:
                _draw_cloud(panel, torch.tensor(shown["clouds"][k]), config, last=k == columns - 1)
        row[0].set_ylabel(NAMES[net])
        panel = row[columns]
        for record in (r for r in records if r["net"] == net):
            at = [(i + 1) * max(1, config.steps // SEEN) for i in range(len(record["curve"]))]
            panel.plot(at, [100 * a for a in record["curve"]], color=COLOURS[net], lw=1.2)
        panel.set(ylim=(45, 102), xlabel="step" if net == NETS[-1] else "", ylabel="accuracy, %")
        panel.set_title("test, every seed" if net == NETS[0] else "")
        panel.grid(axis="y", alpha=0.25)
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], ls="", marker=m, color=c, label=f"class {k}")
        for k, (m, c) in enumerate((("o", ORANGE), ("^", BLUE)))
    ]
    line = Line2D([], [], color="#111827", lw=1, label="the decision: x₁ = x₂")
    picture.legend(handles=[*marks, line], loc="outside lower center", ncols=3)
    return picture


def _draw_cloud(panel: Any, cloud: Tensor, config: Config, last: bool) -> None:
    """The classes differ in marker, the rings of a class in shade."""
    ring = torch.arange(RINGS).repeat_interleave(config.drawn)
    for i, colour in enumerate((ORANGE, BLUE, YELLOW, SKY)):
        panel.scatter(*cloud[ring == i].t().tolist(), s=7, color=colour, marker="o^"[i % 2], linewidths=0)
    if last:
        panel.axline((0, 0), slope=1, color="#111827", lw=1)


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found, shares = [], {net: [100 * r["accuracy"] for r in records if r["net"] == net] for net in NETS}
    targets = {"momentum": ("≥ 99 % for every seed", min(shares["momentum"], default=0) >= 99),
               "resnet": ("below 90 % for every seed", max(shares["resnet"], default=0) < 90), "fast": ("", None)}  # fmt: skip
    for net, accuracies in shares.items():
        if accuracies:
            text = f"{spread(accuracies, '.1f', ' %')} (worst {min(accuracies):.1f}, best {max(accuracies):.1f})"
            found.append(Finding(f"test accuracy, {NAMES[net]}", text, *targets[net]))
    pairs = min(len(shares["momentum"]), len(shares["resnet"]))
    if pairs:
        found.append(
            compared(
                "test accuracy, Momentum less ResNet",
                shares["momentum"][:pairs],
                shares["resnet"][:pairs],
                least=10.0,
                form=".1f",
            )
        )
    sizes = {r["parameters"] for r in records}
    if sizes:
        found.append(Finding("parameters of each", ", ".join(map(str, sorted(sizes))), "the same", len(sizes) == 1))
    return found
