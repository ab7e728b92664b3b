"""Fig. 1: trajectories of a ResNet cannot cross, those of a Momentum ResNet can: learning x ↦ −x³ on the line.

    f(x) = W₂ᵀ tanh(W₁x + b₁) + b₂, the same at each of 15 layers       ResNet: x ← x + f(x)       Momentum: γ = 0.9, v₀ = 0

For every seed all start from the same weights and see the same points of [−1, 1] (all at once; Adam, one-cycle rate, divided by
1−γ because f is multiplied by it). The paper gives map, depth and γ; width, interval and optimiser are ours. W₂ and b₂ start divided
by the depth, so that the ResNet starts as a discretised flow: a flow of the line keeps the order of points, −x³ reverses it, and the
best that keeps the order is the constant 0. With 15 layers that is no theorem, so a third network, "fast", is the ResNet at a higher
rate. The least slope of a layer x ↦ x + f(x) tells whether steps stayed short: above 0 a layer keeps the order, as a flow does.

What theory says: no second-order model ε ẍ + ẋ = f(x) with v₀ = 0 gives x ↦ −x³ on all of [−1, 1] either, since at x₀ = 1 the point
would have to climb back (`retrograde.theory.obstruction`). Short of ±1 nothing forbids it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log10
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde import theory

from .config import Settings
from .findings import Finding, compared, spread
from .loop import steps
from .metrics import Key, Record
from .run import Context, one_thread
from .style import COLOURS, MARKERS, NAMES, PAPER, canvas

NETS = ("resnet", "momentum", "fast")
CURVE = 100  # points of the learning curves
REACH = 1.5  # the slope of a layer is looked at on [−REACH, REACH]


@dataclass(frozen=True)
class Config(Settings):
    depth: int = 15
    gamma: float = 0.9
    hidden: int = 16
    points: int = 101
    steps: int = 10_000
    rate: float = 0.001  # of the ResNet; the Momentum ResNet's is 1/(1−γ) times that
    fast: float = 3.0  # times the rate: of the third network
    repeats: int = 5
    drawn: int = 15  # trajectories kept for the figure

    @classmethod
    def default(cls) -> Config:
        return cls(steps=8000, repeats=3)

    @classmethod
    def smoke(cls) -> Config:
        return cls(steps=40, repeats=2)

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, tied weights, γ = {self.gamma:g}, {self.hidden} hidden units, {self.points} points of [−1, 1], "
            f"{self.steps:,} Adam steps of rate {self.rate:g}/(1−γ), for a second ResNet {self.fast:g} times that, "
            f"{self.repeats} seeds."
        )


def units(config: Config) -> list[Key]:
    return [{"net": "theory"}, *({"net": net, "seed": seed} for seed in range(config.repeats) for net in NETS)]


def branch(config: Config, seed: int) -> nn.Sequential:
    """f, with steps of the size 1/depth."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        f = nn.Sequential(nn.Linear(1, config.hidden), nn.Tanh(), nn.Linear(config.hidden, 1))
    with torch.no_grad():
        for parameter in f[2].parameters():
            parameter.div_(config.depth)
    return f


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    if unit["net"] == "theory":
        inner = torch.linspace(0.01, 0.99, 99).tolist()
        return {
            "at one": theory.obstruction(lambda x: -(x**3), [1.0]),
            "below": theory.obstruction(lambda x: -(x**3), inner),
        }
    with one_thread():
        gamma = config.gamma if unit["net"] == "momentum" else 0
        net = rg.MomentumNet([branch(config, unit["seed"])] * config.depth, gamma, memory="store")
        x = torch.linspace(-1, 1, config.points).unsqueeze(1)
        rate = config.rate / (1 - gamma) * (config.fast if unit["net"] == "fast" else 1)
        losses = train(net, x, -(x**3), rate, config, context)
        with torch.no_grad():
            error = float((net(x) + x**3).square().mean())
            path = trajectory(net, torch.linspace(-1, 1, config.drawn).unsqueeze(1))
            grid = torch.linspace(-REACH, REACH, 601).unsqueeze(1)
            layer = grid + net.blocks[0](grid)
            slope = float(((layer[1:] - layer[:-1]) / (grid[1:] - grid[:-1])).min())
    paths = [[round(v, 5) for v in row] for row in path.tolist()]
    return {"error": error, "loss": losses, "slope": slope, "trajectories": paths}


def train(net: nn.Module, x: Tensor, target: Tensor, rate: float, config: Config, context: Context) -> list[float]:
    """The error at every hundredth of the training."""
    optimizer = torch.optim.Adam(net.parameters(), rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=config.steps, pct_start=0.1)
    losses: list[float] = []
    parts = {"net": net, "optimizer": optimizer, "schedule": schedule}
    for step in steps(context, config.steps, parts, {"losses": losses}):
        optimizer.zero_grad()
        loss = (net(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, config.steps // CURVE) == 0:
            losses.append(loss.item())
    return losses


def trajectory(net: rg.MomentumNet, x: Tensor) -> Tensor:
    """x after 0, 1, …, depth layers: (layers + 1, points)."""
    blocks, gamma = list(net.blocks), float(net.gamma)
    partial = [rg.MomentumNet(blocks[:k], gamma, memory="store")(x) for k in range(1, len(blocks) + 1)]
    return torch.stack([x, *partial]).squeeze(-1)


def figure(config: Config, records: list[Record]) -> Any:
    """The activations of seed 0 layer by layer; then of all seeds the learning curves, and the least slope of a layer."""
    picture, axes = canvas(10, 6.2, 2, 3)
    for panel, net in zip(axes[0], NETS, strict=True):
        _draw_paths(panel, net, config, records)
    axes[0][0].set_ylabel("activation")
    curves, slopes, words = axes[1]
    for net in NETS:
        for i, record in enumerate(r for r in records if r["net"] == net):
            at = [k * max(1, config.steps // CURVE) for k in range(len(record["loss"]))]
            curves.plot(at, record["loss"], color=COLOURS[net], lw=1.2, label=None if i else NAMES[net])
            slopes.plot(
                record["slope"], record["error"], MARKERS[net], color=COLOURS[net], label=None if i else NAMES[net]
            )
    best = _best(config)
    curves.axhline(best, **PAPER, label=f"the best that keeps the order: {best:.3f}")
    curves.set(title="training, every seed", xlabel="step", ylabel="mean squared error", yscale="log")
    slopes.axvspan(0, max(1.0, slopes.get_xlim()[1]), color="#e5e7eb", zorder=0)
    slopes.set(
        title="at the end, every seed", xlabel="least slope of x ↦ x + f(x)", ylabel="mean squared error", yscale="log"
    )
    slopes.annotate(
        "order kept",
        (0.5, 0.5),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="center",
        rotation=90,
        fontsize=9,
        color="#374151",
    )
    words.axis("off")
    handles = {
        label: h for axis in (curves, slopes) for h, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    words.legend(handles.values(), handles.keys(), loc="upper left")
    return picture


def _draw_paths(panel: Any, net: str, config: Config, records: list[Record]) -> None:
    import matplotlib

    panel.set(title=NAMES[net], xlabel="layer", ylim=(-1.5, 1.5), xticks=range(0, config.depth + 1, 3))
    shown = next((r for r in records if r["net"] == net), None)
    if shown is None:
        return
    for path in torch.tensor(shown["trajectories"]).t():
        start = float(path[0])
        colour = matplotlib.colormaps["viridis"](0.45 * (start + 1))
        panel.plot(path.tolist(), "-", color=colour, lw=1.4)
        panel.plot(len(path) - 0.4, -(start**3), marker="_", color=colour, ms=10, mew=2.2)
    panel.annotate("targets −x³", (len(path) - 0.2, -1.35), ha="right", fontsize=8.5, color="#374151")


def _best(config: Config) -> float:
    """The least mean squared error of a map that keeps the order: the constant 0."""
    return float((torch.linspace(-1, 1, config.points) ** 6).mean())


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    said = next((r for r in records if r["net"] == "theory"), None)
    if said is not None:
        found.append(
            Finding("theory: a second-order model gives −x³ on [−1, 1]", f"no, refuted at x₀ = {said['at one']:g}")
        )
        found.append(Finding("theory: refuted below |x| = 1", "no" if said["below"] is None else "yes"))
    errors = {net: [r["error"] for r in records if r["net"] == net] for net in NETS}
    for net in NETS:
        if errors[net]:
            found.append(Finding(f"mean squared error, {NAMES[net]}", spread(errors[net], ".3g")))
            slopes = [r["slope"] for r in records if r["net"] == net]
            found.append(Finding(f"least slope of x + f(x), {NAMES[net]}", spread(slopes, ".2f")))
    pairs = min(len(errors["momentum"]), len(errors["resnet"]))
    if pairs:
        logs = [[log10(e) for e in errors[net][:pairs]] for net in ("momentum", "resnet")]
        found.append(compared("log₁₀ of the error, Momentum less ResNet", *logs, most=-1.0, unit=""))
        best, worst = _best(config), min(errors["resnet"])
        found.append(
            Finding(
                "error of the ResNet : best that keeps the order",
                f"{worst / best:.3f}",
                "≥ 0.99, every seed",
                worst >= 0.99 * best,
            )
        )
    return found
