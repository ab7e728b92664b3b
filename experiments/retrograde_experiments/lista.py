"""Fig. 10: learning to optimise: the Lasso cost after L learned layers, for LISTA, its Momentum form and its RevNet form.

    D: 16×32 Gaussian, columns of norm 1      y: Gaussian, scaled so that ‖Dᵀy‖∞ = 1      λ = 0.1
    SGD on the mean cost of fresh y; every layer its own W¹, W², from ISTA's with step size η

Where the paper is silent: the cost is averaged over the batch, v₀ = 0, γ = 0.3, and η of the start. Each form is trained from every
η of its grid, in units of 1/‖D‖²: ISTA and LISTA are stable below 2, momentum below 2(1+γ)/(1−γ), a RevNet at none. Two comparisons
follow: each form at its own best η (chosen by the cost on samples that neither train nor test), and all at the common η = 1. The least
cost (ISTA run long) stands beside them.

All dictionaries and all η of a form and depth are trained side by side in batched products. The recurrences are those of
`retrograde.nets.lista.Lista` in floats; a test holds them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrograde.nets.lista import dictionary, ista, lasso, samples, step_size

from .config import Settings
from .findings import Finding, compared
from .loop import steps
from .metrics import Key, Record
from .run import Context, one_thread
from .style import COLOURS, MARKERS, canvas

NETS = ("resnet", "momentum", "revnet")
NAMES = {"resnet": "LISTA", "momentum": "Momentum", "revnet": "RevNet", "ista": "ISTA"}
COMMON = 1.0  # η that all forms are started from, too
LIMIT = 1e6  # of the mean cost, which is 2 at x = 0: beyond it, training does not come back


@dataclass(frozen=True)
class Config(Settings):
    decisive: ClassVar[tuple[str, ...]] = ("depths", "steps", "batch", "rate")

    d: int = 16
    p: int = 32
    lam: float = 0.1
    depths: tuple[int, ...] = (1, 2, 5, 10, 15, 20)
    gamma: float = 0.3
    resnet_etas: tuple[float, ...] = (1.0, 1.5, 1.9)  # η of the start, in units of 1/‖D‖²
    momentum_etas: tuple[float, ...] = (1.0, 2.0, 3.0, 3.5)
    revnet_etas: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0)
    steps: int = 10_000
    batch: int = 1000
    rate: float = 1e-3
    test: int = 10_000
    repeats: int = 10  # dictionaries

    @classmethod
    def default(cls) -> Config:
        return cls(steps=2500, rate=4e-3, batch=50, test=2000)

    @classmethod
    def smoke(cls) -> Config:
        return cls(depths=(2, 6), steps=12, batch=20, test=100, repeats=3)

    def setting(self) -> str:
        etas = "; ".join(f"{NAMES[net]} {', '.join(f'{eta:g}' for eta in self.etas(net))}" for net in NETS)
        return (
            f"D {self.d}×{self.p}, λ = {self.lam:g}, depths {', '.join(map(str, self.depths))}, SGD rate {self.rate:g}, "
            f"batch {self.batch:,}, {self.steps:,} steps, γ = {self.gamma:g}, η·‖D‖² of the start: {etas}; {self.test:,} test "
            f"samples, {self.repeats} dictionaries. The paper: rate 0.001, batch 1,000, 10,000 steps."
        )

    def etas(self, net: str) -> tuple[float, ...]:
        return {"resnet": self.resnet_etas, "momentum": self.momentum_etas, "revnet": self.revnet_etas}[net]


def units(config: Config) -> list[Key]:
    return [{"net": "ista"}, *({"net": net, "depth": depth} for depth in config.depths for net in NETS)]


def problems(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """The dictionaries, and of each the samples that choose η and those that test: (repeats, …)."""
    found = []
    for seed in range(config.repeats):
        generator = torch.Generator().manual_seed(1_000_000 * seed)
        D = dictionary(config.d, config.p, generator=generator)
        test = samples(config.test, D, generator=generator)
        found.append((D, samples(config.test, D, generator=generator), test))
    D, choosing, test = (torch.stack(parts) for parts in zip(*found, strict=True))
    return D, choosing, test


class Side(nn.Module):
    """Networks of one form and depth side by side: for each dictionary one from every η.

    Shape:
        y: (dictionaries, samples, d) → the mean cost of each network, (dictionaries, etas).
    """

    def __init__(self, D: Tensor, lam: float, depth: int, form: str, gamma: float, etas: tuple[float, ...]) -> None:
        super().__init__()
        self.form, self.lam, self.gamma, self.depth = form, lam, gamma, depth
        self.D: Tensor
        self.threshold: Tensor
        eta = torch.tensor([[step_size(one) * each for each in etas] for one in D])[:, :, None, None]
        self.register_buffer("D", D[:, None])
        self.register_buffer("threshold", lam * eta)
        layers = depth * (2 if form == "revnet" else 1)
        across, identity = D.mT[:, None], torch.eye(D.shape[2])
        self.W1 = nn.ParameterList([identity - eta * (across @ self.D) for _ in range(layers)])
        self.W2 = nn.ParameterList([eta * across for _ in range(layers)])

    def f(self, layer: int, x: Tensor, y: Tensor) -> Tensor:
        """ST(W¹x + W²y, ηλ) − x."""
        z = x @ self.W1[layer].mT + y @ self.W2[layer].mT
        return z - z.clamp(-self.threshold, self.threshold) - x

    def forward(self, y: Tensor) -> Tensor:
        y = y[:, None]
        x = y.new_zeros(*self.threshold.shape[:2], y.shape[2], self.D.shape[-1])
        v = torch.zeros_like(x)
        for layer in range(self.depth):
            if self.form == "resnet":
                x = x + self.f(layer, x, y)
            elif self.form == "momentum":
                v = self.gamma * v + (1 - self.gamma) * self.f(layer, x, y)
                x = x + v
            else:
                v = v + self.f(layer, x, y)
                x = x + self.f(self.depth + layer, v, y)
        apart = y - x @ self.D.mT
        return (apart.square().sum(-1) / 2 + self.lam * x.abs().sum(-1)).mean(-1)


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        D, choosing, test = (t.to(context.device) for t in problems(config))
        if unit["net"] == "ista":
            return _reference(config, D, test)
        etas = config.etas(unit["net"])
        net = Side(D.cpu(), config.lam, unit["depth"], unit["net"], config.gamma, etas).to(context.device)
        optimizer = torch.optim.SGD(net.parameters(), config.rate)
        curve: list[Any] = []
        for step in steps(context, config.steps, {"net": net}, {"curve": curve}):
            if step % max(1, config.steps // 10) == 0:
                curve.append(costs(net, choosing))
            y = torch.stack([_fresh(config, D[k], step, k) for k in range(config.repeats)])
            optimizer.zero_grad()
            net(y).sum().backward()
            optimizer.step()
        curve.append(costs(net, choosing))
        return {"etas": list(etas), "choosing": curve[-1], "test": costs(net, test), "curve": curve}


def _reference(config: Config, D: Tensor, test: Tensor) -> dict[str, Any]:
    """The cost of ISTA at the depths, and the least cost, of each dictionary."""
    losses, least = [], []
    for one, y in zip(D, test, strict=True):
        losses.append([float(lasso(ista(y, one, config.lam, k), y, one, config.lam).mean()) for k in config.depths])
        exact = ista(y.double(), one.double(), config.lam, 5000)
        least.append(float(lasso(exact, y.double(), one.double(), config.lam).mean()))
    return {"depths": list(config.depths), "losses": losses, "least": least}


def _fresh(config: Config, D: Tensor, step: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + step + 1_000_000 * seed)
    return samples(config.batch, D.cpu(), generator=generator).to(D.device)


@torch.no_grad()
def costs(net: Side, y: Tensor) -> list[list[float | None]]:
    """The mean cost of every network; None where it has diverged."""
    return [[cost if cost < LIMIT else None for cost in row] for row in net(y).tolist()]


def best(record: Record) -> list[float]:
    """The test cost of each dictionary from the η with the least cost on the other samples; infinite where all diverged."""
    found = []
    for choosing, test in zip(record["choosing"], record["test"], strict=True):
        cost, k = min((inf if value is None else value, k) for k, value in enumerate(choosing))
        found.append(inf if cost == inf or test[k] is None else test[k])
    return found


def common(record: Record) -> list[float]:
    """The test cost of each dictionary from η = 1."""
    k = record["etas"].index(COMMON)
    return [inf if row[k] is None else row[k] for row in record["test"]]


def _trained(records: list[Record]) -> dict[tuple[str, int], Record]:
    return {(r["net"], r["depth"]): r for r in records if r["net"] in NETS}


def figure(config: Config, records: list[Record]) -> Any:
    """Left: each form from its own best η; right: from the common one. The least cost is the zero of the axes."""
    picture, axes = canvas(10, 4, 1, 2, sharey=True)
    found, reference = _trained(records), next((r for r in records if r["net"] == "ista"), None)
    least = reference["least"] if reference else [0.0] * config.repeats
    for axis, chosen, title in zip(
        axes, (best, common), ("each from its own best η", "all from η = 1/‖D‖²"), strict=True
    ):
        if reference:
            rows = zip(*reference["losses"], strict=True)
            _band(
                axis,
                "ista",
                {
                    d: [c - l for c, l in zip(row, least, strict=True)]
                    for d, row in zip(config.depths, rows, strict=True)
                },
            )
        gone = []
        for net in NETS:
            above = {
                d: [c - l for c, l in zip(chosen(found[net, d]), least, strict=True)]
                for d in config.depths
                if (net, d) in found
            }
            gone += [(d, values.count(inf)) for d, values in above.items() if inf in values]
            _band(axis, net, {d: values for d, values in above.items() if inf not in values})
        for depth, count in gone:
            axis.annotate(f"RevNet diverges\nfor {count} of {config.repeats}", (depth, 1), xycoords=("data", "axes fraction"),
                          color=COLOURS["revnet"], fontsize=7.5, ha="right", va="top")  # fmt: skip
        axis.set(xlabel="depth L", yscale="log", title=title, xticks=config.depths)
        axis.grid(alpha=0.25, which="major")
    axes[0].set_ylabel("test cost above the least")
    if axes[0].lines:
        axes[0].legend()
    return picture


def _band(axis: Any, net: str, by_depth: dict[int, list[float]]) -> None:
    """The mean over the dictionaries, and from the least to the most."""
    if by_depth:
        depths, values = list(by_depth), list(by_depth.values())
        line = "--" if net == "ista" else "-"
        axis.plot(depths, [sum(v) / len(v) for v in values], MARKERS[net] + line, color=COLOURS[net], label=NAMES[net])
        axis.fill_between(
            depths, [min(v) for v in values], [max(v) for v in values], color=COLOURS[net], alpha=0.15, linewidth=0
        )


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found, answers = _trained(records), []
    for chosen, name in ((best, "own best η"), (common, "common η")):
        for depth in config.depths:
            both = [chosen(found[net, depth]) for net in ("momentum", "resnet") if (net, depth) in found]
            if len(both) == 2 and inf not in (*both[0], *both[1]):
                most = 0.0 if chosen is best else inf  # at the common η the paper is not tested, only told of
                answers.append(
                    compared(f"Momentum less LISTA, {name}, L = {depth}", *both, most=most, form=".4f", unit="")
                )
    for depth in config.depths:
        if {(net, depth) for net in NETS} <= found.keys():
            rev, plain = (best(found[net, depth]) for net in ("revnet", "resnet"))
            left = [k for k, cost in enumerate(rev) if cost < inf]
            gone = f" (diverges with {len(rev) - len(left)} of {len(rev)} dictionaries)" if len(left) < len(rev) else ""
            name = f"RevNet less LISTA, own best η, L = {depth}"
            if left:
                pair = ([of[k] for k in left] for of in (rev, plain))
                test = compared(name, *pair, least=0.0, form=".4f", unit="")
                answers.append(replace(test, ours=test.ours + gone))
            else:
                answers.append(Finding(name, "diverges with all", "> 0", True))
    return answers
