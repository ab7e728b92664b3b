"""Fig. 1: trajectories of a ResNet cannot cross, those of a Momentum ResNet can: learning x ↦ −x³ on the line.

    f(x) = W₂ᵀ tanh(W₁x + b₁) + b₂, the same at each of 15 layers       ResNet: x ← x + f(x)       Momentum: γ = 0.9, v₀ = 0

For every seed both start from the same weights and see the same points of [−1, 1] (float64, all points at once; Adam, then L-BFGS). The
paper gives map, depth and γ; width, interval and optimiser are ours. W₂ and b₂ start divided by the depth, so that the ResNet starts
as a discretised flow: a flow of the line keeps the order of points, −x³ reverses it, and the best that keeps the order is the constant 0.
With 15 layers that is no theorem: a ResNet with steep enough f leaves the flow. L-BFGS from the start, without Adam's small steps first,
found such an f for 2 of 3 seeds (errors of 3e-5 and 0.06).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

from .checkpoint import restore, state_of
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context, one_thread
from .style import COLOURS, NAMES, canvas

NETS = ("resnet", "momentum")
ROUND = 25  # L-BFGS steps between checkpoints


@dataclass(frozen=True)
class Config:
    depth: int = 15
    gamma: float = 0.9
    hidden: int = 16
    points: int = 101
    warmup: int = 300  # steps of Adam
    rate: float = 0.01
    rounds: int = 30  # of L-BFGS steps
    decay: float = 1e-6  # of the squared weights: keeps activations near [−1, 1]
    repeats: int = 5
    drawn: int = 15  # trajectories kept for the figure

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(repeats=2)

    @classmethod
    def smoke(cls) -> Config:
        return cls(warmup=20, rounds=2, repeats=2)

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, tied weights, γ = {self.gamma:g}, {self.hidden} hidden units, {self.points} points of [−1, 1], "
            f"{self.warmup} Adam and {ROUND * self.rounds:,} L-BFGS steps, {self.repeats} seeds."
        )


def units(config: Config) -> list[Key]:
    return [{"net": net, "seed": seed} for seed in range(config.repeats) for net in NETS]


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
    with one_thread():
        gamma = config.gamma if unit["net"] == "momentum" else 0
        # In evaluation mode, a trial step of the line search that leaves the fixed-point range is calibrated for on the spot.
        net = rg.MomentumNet([branch(config, unit["seed"])] * config.depth, gamma, memory="store").double().eval()
        x = torch.linspace(-1, 1, config.points, dtype=torch.float64).unsqueeze(1)
        target = -(x**3)
        losses = train(net, x, target, config, context)
        with torch.no_grad():
            error = float((net(x) - target).square().mean())
            starts = torch.linspace(-1, 1, config.drawn, dtype=torch.float64).unsqueeze(1)
            path = trajectory(net, starts)
    return {"error": error, "loss": losses, "trajectories": [[round(v, 5) for v in row] for row in path.tolist()]}


def train(net: nn.Module, x: Tensor, target: Tensor, config: Config, context: Context) -> list[float]:
    """The loss before each round of L-BFGS steps."""
    optimizer = torch.optim.LBFGS(
        net.parameters(),
        max_iter=ROUND,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )
    losses: list[float] = []
    state = context.checkpoint.load()
    if state is not None:
        restore(net, state["net"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    context.progress.steps(config.rounds, len(losses))
    if state is None:
        adam = torch.optim.Adam(net.parameters(), config.rate)
        for _ in range(config.warmup):  # a kill within these begins them anew
            adam.zero_grad()
            (net(x) - target).square().mean().backward()
            adam.step()

    def closure() -> float:
        optimizer.zero_grad()
        error = (net(x) - target).square().mean()
        loss = error + config.decay * sum(p.square().sum() for p in net.parameters())
        loss.backward()
        return loss.item()

    for _ in range(len(losses), config.rounds):
        if context.checkpoint.due():
            context.checkpoint.save({"losses": losses, "net": state_of(net), "optimizer": optimizer.state_dict()})
        losses.append(optimizer.step(closure))
        context.progress.step(f"error {losses[-1]:.4f}")
    return losses


def trajectory(net: rg.MomentumNet, x: Tensor) -> Tensor:
    """x after 0, 1, …, depth layers: (layers + 1, points)."""
    blocks, gamma = list(net.blocks), float(net.gamma)
    partial = [rg.MomentumNet(blocks[:k], gamma, memory="store")(x) for k in range(1, len(blocks) + 1)]
    return torch.stack([x, *partial]).squeeze(-1)


def figure(config: Config, records: list[Record]) -> Any:
    """Left and middle: the activations of seed 0 layer by layer; right: the learning curves of all seeds."""
    import matplotlib

    picture, axes = canvas(12, 4, 1, 3)
    colours = matplotlib.colormaps["coolwarm"]
    for panel, net in zip(axes, NETS, strict=False):
        shown = next((r for r in records if r["net"] == net), None)
        panel.set(
            title=NAMES[net],
            xlabel="layer",
            ylabel="activation",
            ylim=(-1.25, 1.25),
            xticks=range(0, config.depth + 1, 3),
        )
        if shown is None:
            continue
        paths = torch.tensor(shown["trajectories"])
        for i, path in enumerate(paths.t()):
            start = float(path[0])
            panel.plot(path.tolist(), "-", color=colours((start + 1) / 2), lw=1.6)
            panel.plot(len(path) - 1 + 0.45, -(start**3), marker="_", color=colours((start + 1) / 2), ms=11, mew=2.4)
            if i == 0:
                panel.annotate("target −x³", (len(path) - 0.2, -1.19), ha="right", fontsize=9, color="#374151")
    for net in NETS:
        for i, record in enumerate(r for r in records if r["net"] == net):
            curve = [*record["loss"], record["error"]]
            steps = [config.warmup + ROUND * k for k in range(len(curve))]
            axes[2].plot(steps, curve, color=COLOURS[net], alpha=0.8, lw=1.5, label=None if i else NAMES[net])
    best = float(torch.linspace(-1, 1, config.points).pow(6).mean())
    axes[2].axhline(best, color="#111827", lw=0.9, ls=":")
    axes[2].annotate(
        f"best that keeps the order: {best:.3f}",
        (0.98, best),
        (0, -12),
        textcoords="offset points",
        fontsize=9,
        ha="right",
        xycoords=("axes fraction", "data"),
    )
    axes[2].set(title="Mean squared error, every seed", xlabel="step", yscale="log")
    axes[2].legend(loc="lower left")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    errors = {net: [r["error"] for r in records if r["net"] == net] for net in NETS}
    found = [Finding(f"mean squared error, {NAMES[net]}", spread(errors[net], ".2g")) for net in NETS if errors[net]]
    pairs = list(zip(errors["momentum"], errors["resnet"], strict=False))
    if pairs:
        worst = max(momentum / resnet for momentum, resnet in pairs)
        found.append(Finding("error, Momentum / ResNet, worst seed", f"{worst:.2g}", "≤ 0.1", worst <= 0.1))
    return found
