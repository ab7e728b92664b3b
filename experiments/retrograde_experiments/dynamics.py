"""Fig. 1: trajectories of a ResNet cannot cross, those of a Momentum ResNet can: learning x ↦ −x³ on the line.

    f(x) = W₂ᵀ tanh(W₁x + b₁) + b₂, the same at each of 15 layers       ResNet: x ← x + f(x)       Momentum: γ = 0.9, v₀ = 0

For every seed both start from the same weights and see the same points of [−1, 1] (all at once; Adam, one-cycle rate, divided by 1−γ
because f is multiplied by it). The paper gives map, depth and γ; width, interval and optimiser are ours. W₂ and b₂ start divided by the
depth, so that the ResNet starts as a discretised flow: a flow of the line keeps the order of points, −x³ reverses it, and the best that
keeps the order is the constant 0. With 15 layers that is no theorem: trained at a higher rate for longer, the ResNet stays there for
thousands of steps and then leaves the flow with a steep f (docs/reproduce.md has numbers).
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
CURVE = 100  # points of the learning curves


@dataclass(frozen=True)
class Config:
    depth: int = 15
    gamma: float = 0.9
    hidden: int = 16
    points: int = 101
    steps: int = 10_000
    rate: float = 0.001  # of the ResNet; the Momentum ResNet's is 1/(1−γ) times that
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
        return cls(steps=40, repeats=2)

    def setting(self) -> str:
        return (
            f"Depth {self.depth}, tied weights, γ = {self.gamma:g}, {self.hidden} hidden units, {self.points} points of [−1, 1], "
            f"{self.steps:,} Adam steps of rate {self.rate:g}/(1−γ), {self.repeats} seeds."
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
        net = rg.MomentumNet([branch(config, unit["seed"])] * config.depth, gamma, memory="store")
        x = torch.linspace(-1, 1, config.points).unsqueeze(1)
        target = -(x**3)
        losses = train(net, x, target, config.rate / (1 - gamma), config, context)
        with torch.no_grad():
            error = float((net(x) - target).square().mean())
            starts = torch.linspace(-1, 1, config.drawn).unsqueeze(1)
            path = trajectory(net, starts)
    return {"error": error, "loss": losses, "trajectories": [[round(v, 5) for v in row] for row in path.tolist()]}


def train(net: nn.Module, x: Tensor, target: Tensor, rate: float, config: Config, context: Context) -> list[float]:
    """The error at every hundredth of the training."""
    optimizer = torch.optim.Adam(net.parameters(), rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=config.steps, pct_start=0.1)
    losses: list[float] = []
    state = context.checkpoint.load()
    if state is not None:
        restore(net, state["net"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        losses = state["losses"]
    first = 0 if state is None else state["step"]
    context.progress.steps(config.steps, first)
    for step in range(first, config.steps):
        if context.checkpoint.due():
            context.checkpoint.save({
                "step": step, "losses": losses, "net": state_of(net), "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            })  # fmt: skip
        optimizer.zero_grad()
        loss = (net(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, config.steps // CURVE) == 0:
            losses.append(loss.item())
        context.progress.step(f"error {loss.item():.4f}")
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
            ylim=(-1.5, 1.5),
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
                panel.annotate("target −x³", (len(path) - 0.2, -1.28), ha="right", fontsize=9, color="#374151")
    for net in NETS:
        for i, record in enumerate(r for r in records if r["net"] == net):
            curve = [*record["loss"], record["error"]]
            steps = [*(k * max(1, config.steps // CURVE) for k in range(len(record["loss"]))), config.steps]
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
    axes[2].legend(loc="upper right")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    errors = {net: [r["error"] for r in records if r["net"] == net] for net in NETS}
    found = [Finding(f"mean squared error, {NAMES[net]}", spread(errors[net], ".3g")) for net in NETS if errors[net]]
    pairs = list(zip(errors["momentum"], errors["resnet"], strict=False))
    if pairs:
        worst = max(momentum / resnet for momentum, resnet in pairs)
        found.append(Finding("error, Momentum / ResNet, worst seed", f"{worst:.2g}", "≤ 0.1", worst <= 0.1))
    return found
