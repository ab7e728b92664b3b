"""Fig. 2: memory of a training step over depth: linear for a ResNet, nearly flat for a Momentum ResNet.

    f(x) = W₂ᵀ tanh(W₁x + b), the same at each of k layers; batch 500, d = 500, γ = 1 − 1/(50k)

Every allocation of one forward and backward pass is counted, above parameters, gradients and input (`retrograde.measure`). The
paper does not give the width p of f: 8, as in the authors' published example, where a block's own activations weigh nothing; and 2,000,
where they outweigh x and a checkpoint per block drops them. "checkpoint" keeps each block's input (torch.utils.checkpoint), "sqrt" that
of every √k-th block (torch.utils.checkpoint.checkpoint_sequential). "reference" is momentumnet 0.10,
where it is among the `ways` and can be imported:

    pip install --no-deps --target DIR momentumnet==0.10
    PYTHONPATH=DIR retrograde reproduce memory-depth --preset paper --set ways=resnet,checkpoint,sqrt,momentum,reference
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import retrograde as rg

from .config import Settings
from .errors import ExperimentError
from .findings import Finding
from .metrics import Key, Record
from .private import human
from .run import Context, one_thread
from .style import COLOURS, MARKERS, NAMES, canvas

WAYS = ("resnet", "checkpoint", "sqrt", "momentum", "reference")


@dataclass(frozen=True)
class Config(Settings):
    batch: int = 500
    d: int = 500
    hidden: tuple[int, ...] = (8, 2000)
    depths: tuple[int, ...] = (1, 50, 100, 150, 200, 250, 300, 350, 400, 450, 500)
    deepest_wide: int = 100  # depths above it are measured at the least width alone
    ways: tuple[str, ...] = ("resnet", "checkpoint", "sqrt", "momentum")

    def __post_init__(self) -> None:
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown:
            raise ValueError(f"there is no way {unknown[0]!r}; there are {', '.join(WAYS)}.")

    @classmethod
    def default(cls) -> Config:
        return cls(depths=(1, 25, 50, 100))

    @classmethod
    def smoke(cls) -> Config:
        return cls(batch=50, d=50, hidden=(8, 200), depths=(1, 10, 20))

    def setting(self) -> str:
        widths, most = " and ".join(map(str, self.hidden)), max(self.depths)
        limit = (
            f" (with the larger up to {self.deepest_wide})" if len(self.hidden) > 1 and most > self.deepest_wide else ""
        )
        return (
            f"Batch {self.batch}, d = {self.d}, {widths} hidden units{limit}, tied weights, γ = 1 − 1/(50k), depths k = "
            f"{', '.join(map(str, self.depths))}; every allocation counted."
        )


class Branch(nn.Module):
    """f(x) = W₂ᵀ tanh(W₁x + b)."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(d, hidden), nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Checkpointed(nn.Module):
    """x ← x + f(x), keeping x and running f again for its gradient."""

    def __init__(self, f: nn.Module, depth: int) -> None:
        super().__init__()
        self.f, self.depth = f, depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = x + checkpoint(self.f, x, use_reentrant=False)
        return x


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Segments(nn.Module):
    """√k segments of √k blocks; the input of each segment is kept and the segment is run again."""

    def __init__(self, f: nn.Module, depth: int) -> None:
        super().__init__()
        self.block, self.depth = Residual(f), depth

    def forward(self, x: Tensor) -> Tensor:
        segments = round(math.sqrt(self.depth))
        return checkpoint_sequential([self.block] * self.depth, segments, x, use_reentrant=False)


def network(way: str, f: nn.Module, depth: int) -> nn.Module:
    """The network of that depth, with f at every layer."""
    gamma = 1 - 1 / (50 * depth)
    if way == "checkpoint":
        return Checkpointed(f, depth)
    if way == "sqrt":
        return Segments(f, depth)
    if way == "reference":
        return reference()([f] * depth, gamma=gamma, use_backprop=False)
    return (
        rg.MomentumNet([f] * depth, gamma, memory="reverse")
        if way == "momentum"
        else rg.MomentumNet([f] * depth, 0, memory="store")
    )


def reference() -> Any:
    """The reference implementation's network."""
    try:
        return importlib.import_module("momentumnet").MomentumNet
    except ImportError as error:
        raise ExperimentError(
            f"the reference implementation cannot be imported ({error}). Install it in a folder of its own (pip install "
            "--no-deps --target DIR momentumnet==0.10) and put that folder on PYTHONPATH, or leave it out: "
            "--set ways=resnet,checkpoint,sqrt,momentum"
        ) from error


def units(config: Config) -> list[Key]:
    narrow = min(config.hidden)
    return [
        {"way": way, "depth": depth, "hidden": hidden}
        for hidden in config.hidden
        for depth in config.depths
        if hidden == narrow or depth <= config.deepest_wide
        for way in config.ways
    ]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        f = Branch(config.d, unit["hidden"]).to(context.device)
        x = torch.rand(config.batch, config.d, device=context.device)
        report = rg.measure(network(unit["way"], f, unit["depth"]), x, repeats=1)
    return {"peak": report.peak, "held": report.held, "parameters": report.parameters}


def figure(config: Config, records: list[Record]) -> Any:
    """A panel for each width. Where the ResNet and its checkpoints agree, its larger hollow marker shows below theirs."""
    picture, axes = canvas(9.4, 4, 1, len(config.hidden), squeeze=False)
    for panel, hidden in zip(axes[0], config.hidden, strict=True):
        for way in config.ways:
            found = sorted((r["depth"], r["peak"] / 1e6) for r in _at(records, hidden) if r["way"] == way)
            if found:
                below = {"ms": 10, "mfc": "white", "lw": 4, "alpha": 0.55} if way == "resnet" else {}
                panel.plot(*zip(*found, strict=True), MARKERS[way] + "-", color=COLOURS[way], label=NAMES[way], **below)
        panel.set(
            xlabel="depth k",
            ylabel="peak memory of a step, MB",
            title=f"{hidden:,} hidden units",
            xscale="log",
            yscale="log",
        )
        panel.grid(alpha=0.25)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
    picture.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return picture


def _at(records: list[Record], hidden: int) -> list[Record]:
    return [r for r in records if r["hidden"] == hidden]


def slope(records: list[Record], way: str) -> float | None:
    """Bytes per layer, by least squares over all depths but 1, where a step's own temporaries are all there is."""
    points = [(r["depth"], r["peak"]) for r in records if r["way"] == way and r["depth"] > 1]
    if len(points) < 2:
        return None
    depths, peaks = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    centred = depths - depths.mean()
    return float((centred * (peaks - peaks.mean())).sum() / centred.square().sum())


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for hidden in config.hidden:
        mine = _at(records, hidden)
        slopes = {way: each for way in config.ways if (each := slope(mine, way)) is not None}
        if {"momentum", "resnet"} <= slopes.keys():
            share = slopes["momentum"] / slopes["resnet"]
            found.append(
                Finding(f"slope, Momentum : ResNet, width {hidden}", f"{100 * share:.1g} %", "≤ 2 %", share <= 0.02)
            )
        found += [
            Finding(f"memory per layer, {NAMES[way]}, width {hidden}", human(each)) for way, each in slopes.items()
        ]
        deepest = max((r["depth"] for r in mine), default=0)
        peaks = [f"{NAMES[r['way']]} {human(r['peak'])}" for r in mine if r["depth"] == deepest]
        if peaks:
            found.append(Finding(f"peak at depth {deepest}, width {hidden}", "; ".join(peaks)))
    return found
