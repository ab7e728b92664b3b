"""Fig. 2: memory of a training step over depth: linear for a ResNet, nearly flat for a Momentum ResNet.

    f(x) = W₂ᵀ tanh(W₁x + b), the same at each of k layers; batch 500, d = 500, γ = 1 − 1/(50k)

Every allocation of one forward and backward pass is counted, above parameters, gradients and input (`retrograde.measure`). The
paper does not give the width p of f: 8, as in the authors' published example. "checkpoint" keeps each block's input
(torch.utils.checkpoint). "reference" is momentumnet 0.10, where it is among the `ways` and can be imported:

    pip install --no-deps --target DIR momentumnet==0.10
    PYTHONPATH=DIR retrograde reproduce memory-depth --preset paper --set ways=resnet,checkpoint,momentum,reference
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from .errors import ExperimentError
from .findings import Finding
from .metrics import Key, Record
from .private import human
from .run import Context, one_thread
from .style import COLOURS, NAMES, canvas

WAYS = ("resnet", "checkpoint", "momentum", "reference")
MARKERS = dict(zip(WAYS, "osDv", strict=True))


@dataclass(frozen=True)
class Config:
    batch: int = 500
    d: int = 500
    hidden: int = 8
    depths: tuple[int, ...] = (1, 50, 100, 150, 200, 250, 300, 350, 400, 450, 500)
    ways: tuple[str, ...] = ("resnet", "checkpoint", "momentum")

    def __post_init__(self) -> None:
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown:
            raise ValueError(f"there is no way {unknown[0]!r}; there are {', '.join(WAYS)}.")

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(depths=(1, 25, 50, 100))

    @classmethod
    def smoke(cls) -> Config:
        return cls(batch=50, d=50, depths=(1, 10, 20))

    def setting(self) -> str:
        return (
            f"Batch {self.batch}, d = {self.d}, {self.hidden} hidden units, tied weights, γ = 1 − 1/(50k), depths k = "
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


def network(way: str, f: nn.Module, depth: int) -> nn.Module:
    """The network of that depth, with f at every layer."""
    gamma = 1 - 1 / (50 * depth)
    if way == "checkpoint":
        return Checkpointed(f, depth)
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
            "--set ways=resnet,checkpoint,momentum"
        ) from error


def units(config: Config) -> list[Key]:
    return [{"way": way, "depth": depth} for depth in config.depths for way in config.ways]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        f = Branch(config.d, config.hidden).to(context.device)
        x = torch.rand(config.batch, config.d, device=context.device)
        report = rg.measure(network(unit["way"], f, unit["depth"]), x, repeats=1)
    return {"peak": report.peak, "held": report.held, "parameters": report.parameters}


def figure(config: Config, records: list[Record]) -> Any:
    picture, axes = canvas(10.5, 3.8, 1, 2)
    for panel, scale in zip(axes, ("linear", "log"), strict=True):
        for way in config.ways:
            points = sorted((r["depth"], r["peak"] / 1e6) for r in records if r["way"] == way)
            if points:
                depths, peaks = zip(*points, strict=True)
                panel.plot(depths, peaks, MARKERS[way] + "-", color=COLOURS[way], ms=4.5, lw=2, label=NAMES[way])
        panel.set(xlabel="depth k", ylabel="peak memory of a step (MB)", yscale=scale, title=f"{scale} scale")
        panel.grid(axis="y", alpha=0.25)
    axes[0].set_ylim(0, None)
    picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return picture


def slope(records: list[Record], way: str) -> float | None:
    """Bytes per layer, by least squares over all depths but 1, where a step's own temporaries are all there is."""
    points = [(r["depth"], r["peak"]) for r in records if r["way"] == way and r["depth"] > 1]
    if len(points) < 2:
        return None
    depths, peaks = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    centred = depths - depths.mean()
    return float((centred * (peaks - peaks.mean())).sum() / centred.square().sum())


def findings(config: Config, records: list[Record]) -> list[Finding]:
    slopes = {way: slope(records, way) for way in config.ways}
    found = [
        Finding(f"memory per layer, {NAMES[way]}", human(each)) for way, each in slopes.items() if each is not None
    ]
    momentum, resnet = slopes.get("momentum"), slopes.get("resnet")
    if momentum is not None and resnet:
        share = momentum / resnet
        found.insert(0, Finding("slope, Momentum / ResNet", f"{100 * share:.1g} %", "≤ 2 %", share <= 0.02))
    deepest = max((r["depth"] for r in records), default=0)
    peaks = {r["way"]: r["peak"] for r in records if r["depth"] == deepest}
    if {"momentum", "resnet"} <= peaks.keys():
        found.append(
            Finding(
                f"peak at depth {deepest}: ResNet, Momentum",
                f"{human(peaks['resnet'])}, {human(peaks['momentum'])}",
            )
        )
    return found
