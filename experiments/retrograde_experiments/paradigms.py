"""Fig. 3: the four paradigms: ResNet and Momentum ResNet, and the equations of first and second order that they discretise.

    ResNet  x ← x + h·f(x)   →   ẋ = f(x)               Momentum ResNet  γ = 1 − h/ε, blocks h·f   →   ε ẍ + ẋ = f(x)

f(x) = −6 tanh x, v₀ = 0, ε = 1, T = 1, all ours: the paper shows a sketch. Trajectories of first order keep the order of their starts,
those of second order cross; the layers of a network approach the curve as their number grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.nets import NeuralODE, SecondOrderODE, discretised

from .config import Settings
from .findings import Finding
from .metrics import Key, Record
from .run import Context, one_thread
from .style import canvas

ORDERS = {"first": ("ResNet", "Neural ODE"), "second": ("Momentum ResNet", "second-order ODE")}


@dataclass(frozen=True)
class Config(Settings):
    layers: int = 15
    fine: int = 240  # layers of the deep network, which should be nearer to the curve
    eps: float = 1.0
    starts: int = 9

    @classmethod
    def smoke(cls) -> Config:
        return cls(starts=3, fine=60)

    def setting(self) -> str:
        return f"f(x) = −6 tanh x, ε = {self.eps:g}, T = 1, {self.layers} and {self.fine} layers, {self.starts} starts in [−1.5, 1.5]."


class F(nn.Module):
    """−6h tanh x."""

    def __init__(self, h: float = 1.0) -> None:
        super().__init__()
        self.h = h

    def forward(self, x: Tensor) -> Tensor:
        return -6 * self.h * torch.tanh(x)


def units(config: Config) -> list[Key]:
    return [{"order": order} for order in ORDERS]


@torch.no_grad()
def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        x = torch.linspace(-1.5, 1.5, config.starts, dtype=torch.float64)[:, None]

        def layers(count: int) -> list[list[float]]:
            whole = discretised(F(), config.eps, count) if unit["order"] == "second" else None
            blocks, gamma = (list(whole.blocks), whole.gamma) if whole else ([F(1 / count)] * count, 0)
            cut = [rg.MomentumNet(blocks[:k], gamma, memory="store")(x) for k in range(1, count + 1)]
            return torch.cat([x, *cut], 1).tolist()

        def curve(points: int) -> list[list[float]]:
            found = [x]
            for k in range(1, points + 1):
                options: dict[str, Any] = {"horizon": k / points, "solver": "dopri8", "rtol": 1e-9, "atol": 1e-11}
                ode = (
                    NeuralODE(F(), **options)
                    if unit["order"] == "first"
                    else SecondOrderODE(F(), config.eps, **options)
                )
                found.append(ode(x))
            return torch.cat(found, 1).tolist()

        deep = layers(config.fine)
        return {
            "layers": [[round(v, 6) for v in row] for row in layers(config.layers)],
            "curve": [[round(v, 6) for v in row] for row in curve(4 * config.layers)],
            "fine": [row[-1] for row in deep],
        }  # fmt: skip


def crossings(paths: list[list[float]]) -> int:
    """Pairs of trajectories whose order changes on the way."""
    order = torch.tensor(paths).diff(dim=0)
    return int((order.sign() != order[:, :1].sign()).any(1).sum())


def figure(config: Config, records: list[Record]) -> Any:
    import matplotlib

    picture, axes = canvas(8, 5.6, 2, 2, sharex=True, sharey=True)
    for row, (order, names) in zip(axes, ORDERS.items(), strict=True):
        record = next((r for r in records if r["order"] == order), None)
        for axis, kind, name in zip(row, ("layers", "curve"), names, strict=True):
            paths = record[kind] if record else []
            for k, path in enumerate(paths):
                times = [i / (len(path) - 1) for i in range(len(path))]
                colour = matplotlib.colormaps["viridis"](0.9 * k / max(1, len(paths) - 1))
                axis.plot(
                    times,
                    path,
                    "o-" if kind == "layers" else "-",
                    color=colour,
                    ms=3,
                    lw=1 if kind == "layers" else 1.8,
                )
            axis.set_title(name)
            axis.axhline(0, color="#d1d5db", lw=0.6, zorder=0)
        row[0].set_ylabel("x")
    for axis in axes[1]:
        axis.set_xlabel("time, or layers · h")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for record in records:
        network, ode = ORDERS[record["order"]]
        count, second = crossings(record["curve"]), record["order"] == "second"
        target = ("> 0", count > 0) if second else ("0", count == 0)
        found.append(Finding(f"neighbouring trajectories that cross, {ode}", str(count), *target))
        ends = [row[-1] for row in record["curve"]]
        near, far = (
            max(abs(a - b) for a, b in zip(x, ends, strict=True))
            for x in (record["fine"], [r[-1] for r in record["layers"]])
        )
        said = f"{far:.3f} with {config.layers} layers, {near:.4f} with {config.fine}"
        found.append(
            Finding(
                f"{network}: distance to the {ode} at its end",
                said,
                "falls like 1/layers",
                near < 1.6 * far * config.layers / config.fine,
            )
        )
    return found
