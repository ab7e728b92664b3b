"""Fig. 10: learning to optimise: the Lasso cost after L learned layers, for LISTA, its Momentum form and its RevNet form.

    D: 16×32 Gaussian, columns of norm 1      y: Gaussian, scaled so that ‖Dᵀy‖∞ = 1      λ = 0.1
    SGD, rate 0.001, batches of 1000 fresh y, 10,000 steps on the mean cost; every layer its own W¹, W², from ISTA's

Where the paper is silent: the cost is averaged over the batch, v₀ = 0, γ = 0.3, and each form starts from ISTA's parameters with the
step size η that suits it, in units of 1/‖D‖²: ISTA and LISTA are stable below 2, momentum below 2(1+γ)/(1−γ), which is where its
acceleration comes from; a RevNet is not stable at any, and explodes the later the smaller η. With one η = 1 for all, momentum does not
beat LISTA (see docs/reproduce.md). A network whose cost overflows is recorded as diverged. The cost of ISTA, and the least cost (ISTA
run long), are there for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import retrograde as rg
from retrograde.nets.lista import Lista, Shrink, dictionary, ista, lasso, samples

from .checkpoint import restore, state_of
from .findings import Finding
from .metrics import Key, Record
from .run import Context, one_thread
from .style import COLOURS, canvas

NETS = ("resnet", "momentum", "revnet")
NAMES = {"resnet": "LISTA", "momentum": "Momentum", "revnet": "RevNet", "ista": "ISTA"}
LIMIT = 1e6  # of the mean cost, which is 2 at x = 0: beyond it, training does not come back


@dataclass(frozen=True)
class Config:
    d: int = 16
    p: int = 32
    lam: float = 0.1
    depths: tuple[int, ...] = (1, 2, 5, 10, 15, 20)
    gamma: float = 0.3
    resnet_eta: float = 1.9  # η of the initial parameters, in units of 1/‖D‖²
    momentum_eta: float = 3.0
    revnet_eta: float = 0.2
    steps: int = 10_000
    batch: int = 1000
    rate: float = 1e-3
    test: int = 10_000
    repeats: int = 1

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(depths=(1, 2, 5, 10), steps=2000, batch=250, test=2000)

    @classmethod
    def smoke(cls) -> Config:
        return cls(depths=(2, 6), steps=12, batch=100, test=500)

    def setting(self) -> str:
        etas = f"{self.resnet_eta:g} (LISTA), {self.momentum_eta:g} (Momentum), {self.revnet_eta:g} (RevNet)"
        return (
            f"D {self.d}×{self.p}, λ = {self.lam:g}, depths {', '.join(map(str, self.depths))}, SGD rate {self.rate:g}, "
            f"batch {self.batch:,}, {self.steps:,} steps, γ = {self.gamma:g}, η·‖D‖² = {etas}, {self.test:,} test "
            f"samples, {self.repeats} dictionar{'ies' if self.repeats > 1 else 'y'}."
        )


def units(config: Config) -> list[Key]:
    seeds = range(config.repeats)
    return [
        *({"net": "ista", "seed": seed} for seed in seeds),
        *({"net": net, "depth": depth, "seed": seed} for seed in seeds for depth in config.depths for net in NETS),
    ]


def problem(config: Config, seed: int) -> tuple[Tensor, Tensor]:
    """D, and the test samples."""
    generator = torch.Generator().manual_seed(1_000_000 * seed)
    D = dictionary(config.d, config.p, generator=generator)
    return D, samples(config.test, D, generator=generator)


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        D, test = (t.to(context.device) for t in problem(config, unit["seed"]))
        if unit["net"] == "ista":
            costs = [float(lasso(ista(test, D, config.lam, k), test, D, config.lam).mean()) for k in config.depths]
            least = float(
                lasso(ista(test.double(), D.double(), config.lam, 5000), test.double(), D.double(), config.lam).mean()
            )
            return {"depths": list(config.depths), "losses": costs, "least": least}
        net = Lista(D, config.lam, unit["depth"], unit["net"], config.gamma, memory="store")
        scale(net, getattr(config, f"{unit['net']}_eta"))
        return train(net, test, config, unit, context)


@torch.no_grad()
def scale(net: Lista, factor: float) -> None:
    """Start from ISTA with `factor` times the step size: W¹ = I − ηDᵀD, W² = ηDᵀ, threshold ηλ."""
    for layer in net.modules():
        if isinstance(layer, Shrink):
            identity = torch.eye(len(layer.W1), dtype=layer.W1.dtype, device=layer.W1.device)
            layer.W1.copy_(identity + factor * (layer.W1 - identity))
            layer.W2.mul_(factor)
            layer.threshold *= factor


def train(net: Lista, test: Tensor, config: Config, unit: Key, context: Context) -> dict[str, Any]:
    """The test cost before, at every tenth of the training, and after it; or the step at which it diverged."""
    optimizer = torch.optim.SGD(net.parameters(), config.rate)
    state = context.checkpoint.load(context.device)
    if state is None:
        first, curve = 0, [cost(net, test)]
    else:
        restore(net, state["net"])
        first, curve = state["step"], state["curve"]
    context.progress.steps(config.steps, first)
    for step in range(first, config.steps):
        if context.checkpoint.due():
            context.checkpoint.save({"step": step, "curve": curve, "net": state_of(net)})
        generator = torch.Generator().manual_seed(1 + step + 1_000_000 * unit["seed"])
        y = samples(config.batch, net.D.cpu(), generator=generator).to(context.device)
        optimizer.zero_grad()
        try:
            loss = net.loss(y)
            loss.backward()
            value = loss.item()
        except (rg.RangeOverflow, ArithmeticError):
            value = float("nan")
        if not value <= LIMIT:
            return {"loss": None, "diverged": step, "curve": curve}
        optimizer.step()
        if (step + 1) % max(1, config.steps // 10) == 0:
            curve.append(cost(net, test))
        context.progress.step(f"cost {value:.4f}")
    return {"loss": cost(net, test), "diverged": None, "curve": curve}


@torch.no_grad()
def cost(net: Lista, y: Tensor) -> float:
    """The mean Lasso cost, NaN where it overflows. In evaluation mode, so that an odd batch does not end the training."""
    net.eval()
    try:
        return float(net.loss(y))
    except (rg.RangeOverflow, ArithmeticError):
        return float("nan")
    finally:
        net.train()


def figure(config: Config, records: list[Record]) -> Any:
    picture, (left, right) = canvas(10.5, 4, 1, 2, width_ratios=(1.25, 1))
    reference = next((r for r in records if r["net"] == "ista" and r["seed"] == 0), None)
    least = reference["least"] if reference else 0.0
    if reference:
        costs = [c - least for c in reference["losses"]]
        left.plot(reference["depths"], costs, "--", color=COLOURS["ista"], lw=1.6, label=NAMES["ista"])
    top = 0.0
    for net in NETS:
        trained = sorted(
            (r["depth"], r["loss"] - least) for r in records if r["net"] == net and r["seed"] == 0 and r["loss"]
        )
        if trained:
            left.plot(*zip(*trained, strict=True), "o-", color=COLOURS[net], label=NAMES[net], ms=5)
            top = max(top, *(value for _, value in trained))
    failed = [r["depth"] for r in records if r["net"] in NETS and r["seed"] == 0 and r["loss"] is None]
    if failed:
        left.plot(
            failed,
            [1.6 * top] * len(failed),
            "x",
            color=COLOURS["revnet"],
            ms=8,
            mew=2.2,
            label="RevNet diverged",
            clip_on=False,
        )
    left.set(xlabel="depth", ylabel="test cost above the least", yscale="log", title="After training")
    left.set_xticks(config.depths)
    left.grid(alpha=0.25, which="major")
    left.legend()
    both = _pairs(config, records)
    if both:
        depths, gains = zip(
            *((depth, 1 - (momentum - least) / (plain - least)) for depth, plain, momentum in both), strict=True
        )
        right.axhline(0, color="#6b7280", lw=0.8)
        right.bar(range(len(depths)), [100 * g for g in gains], color=COLOURS["momentum"], width=0.6)
        right.set(
            xticks=range(len(depths)),
            xticklabels=depths,
            xlabel="depth",
            title="Momentum below LISTA",
        )
        right.set_ylabel("% of LISTA's cost above the least")
        right.grid(axis="y", alpha=0.25)
    return picture


def _pairs(config: Config, records: list[Record], seed: int = 0) -> list[tuple[int, float, float]]:
    """(depth, LISTA's cost, Momentum's), where there are both."""
    losses = {(r["net"], r["depth"]): r["loss"] for r in records if r["net"] in NETS and r["seed"] == seed}
    return [
        (depth, losses["resnet", depth], losses["momentum", depth])
        for depth in config.depths
        if losses.get(("resnet", depth)) and losses.get(("momentum", depth))
    ]


def findings(config: Config, records: list[Record]) -> list[Finding]:
    pairs = [pair for seed in range(config.repeats) for pair in _pairs(config, records, seed)]
    if not pairs:
        return []
    text = "; ".join(f"L={depth}: {plain:.4f} | {momentum:.4f}" for depth, plain, momentum in pairs)
    found = [Finding("test cost, LISTA | Momentum", text)]
    deep = [(plain, momentum) for depth, plain, momentum in pairs if depth >= 5]
    if deep:
        ahead = sum(momentum <= plain for plain, momentum in deep)
        found.append(
            Finding("Momentum ≤ LISTA, depths from 5", f"{ahead} of {len(deep)}", "every depth", ahead == len(deep))
        )
    rev = [r for r in records if r["net"] == "revnet"]
    others = {(r["depth"], r["seed"]): r["loss"] for r in records if r["net"] in ("resnet", "momentum")}
    if rev and others:
        worst = {
            key: max(
                r["loss"] for r in records if r["net"] in ("resnet", "momentum") and (r["depth"], r["seed"]) == key
            )
            for key in others
        }
        below = [
            str(r["depth"]) for r in rev if r["loss"] is not None and r["loss"] <= worst.get((r["depth"], r["seed"]), 0)
        ]
        above = len(rev) - len(below)
        gone = [str(r["depth"]) for r in rev if r["loss"] is None]
        text = f"{above} of {len(rev)}" + (f"; not at L = {', '.join(below)}" if below else "")
        text += f"; diverged at L = {', '.join(gone)}" if gone else ""
        found.append(Finding("RevNet above both", text, "every depth", above == len(rev)))
    return found
