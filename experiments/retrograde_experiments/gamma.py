"""Fig. 6, top: Momentum ResNets trained with one γ and tested with another, as they are and after a short refit.

    trained    one network for every γ of `trained`
    tested     those trained with the least and with the largest γ, with every other γ: as they are; with BatchNorm's statistics
               found anew; and after a few epochs of training (refit)

The network is the one of the paper's published code (residual="branch"): f = bn(conv(…)), nothing follows the addition, v₀ = 0, weight
decay on all parameters, γ = 1 taken literally. There v ← 1·v + 0·f: no f arrives, no block gets a gradient, and all that happens to
its parameters is weight decay, by exp(−Σ rate·decay / (1 − momentum)), which is exp(−3.6) with the paper's schedule
(`efolds`). How large each f is beside its x, and the scale of its last BatchNorm, are kept after every epoch: where f has decayed
away, any γ gives the same network.

With residual="relu" (He's blocks) γ = 1 is run as 0.9999; `gamma=1` of this library is another thing, the limit with f scaled by
1/(1 − γ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, ClassVar

import torch
from torch import nn

from .data.batches import Resident
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context
from .style import BLUE, ORANGE, canvas
from .train import Learner, Recipe, build
from .train.branches import sizes
from .train.learner import fast
from .train.schedule import efolds
from .train.unit import Training, keep_weights, kept_weights, small_set, trained

NEARLY_ONE = 0.9999
LOOKED_AT = 256  # test images on which the sizes of f and x are taken
ENDS = (BLUE, ORANGE)  # colours of the networks trained with the least and with the largest γ
BARS = {"plain": 3, "refit": 1}  # of accuracy lost at most, in %
# Open markers around closed ones where two curves are the same.
LOOKS: dict[str, dict[str, Any]] = {
    "plain": {"marker": "o", "markersize": 3.5, "zorder": 3},
    "statistics": {"marker": "o", "markersize": 7, "markerfacecolor": "white"},
    "refit": {"marker": "^", "markersize": 4},
}
WAYS = {"as it is": ("plain", ":"), "statistics anew": ("statistics", "--"), "refit": ("refit", "-")}


@dataclass(frozen=True)
class Config(Training):
    decisive: ClassVar[tuple[str, ...]] = (
        "data", "model", "residual", "trained", "velocity", "epochs", "refit", "batch", "rate", "schedule", "weight_decay", "limit",
    )  # fmt: skip

    data: str = "cifar10"
    model: str = "resnet101"
    gammas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    trained: tuple[float, ...] = ()  # of `gammas`; none: all of them
    velocity: str = "zero"
    memory: str = "auto"
    refit: int = 20
    refit_rate: float = 0.001

    @classmethod
    def default(cls) -> Config:
        return cls(
            model="resnet34", gammas=(0.0, 0.25, 0.5, 0.75, 0.9, 1.0), memory="store", epochs=8, refit=3, batch=256, rate=0.4,
            schedule="onecycle", weight_decay=1.15e-3, refit_rate=0.02, amp="bf16",
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", model="thin-resnet14", gammas=(0.0, 0.9, 1.0), epochs=2, refit=1, batch=64, rate=0.1, schedule="onecycle",
            refit_rate=0.01, limit=192, channels_last=False,
        )  # fmt: skip

    def setting(self) -> str:
        velocity = {"zero": "0", "first": "f(x₀) of the first block", "learned": "f(x₀) of a block of its own"}
        one = "literal: f has the factor 0" if self.residual == "branch" else f"run as {NEARLY_ONE}"
        refit = f"refit of {self.refit} epochs (rate {self.refit_rate:g} falling to 0)" if self.refit else "no refit"
        decay = efolds(_recipe(self, "trained"), 50_000 // self.batch)
        return (
            f"{self.model} on {self.data}, v₀ = {velocity[self.velocity]}, {self.trained_as()} (a parameter without gradient decays "
            f"by {decay:.1f} e-folds), {refit}; γ = 1 is {one}. The paper: ResNet-101, 220 epochs, refit of 20."
        )

    def all_trained(self) -> tuple[float, ...]:
        return self.trained or self.gammas


def ends(config: Config) -> tuple[float, float]:
    """The γ of the networks that are tested with others."""
    return min(config.all_trained()), max(config.all_trained())


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    for seed in range(config.repeats):
        for gamma in config.all_trained():
            found.append({"train": gamma, "test": gamma, "seed": seed})
            others = [b for b in config.gammas if b != gamma and gamma in ends(config)]
            found += [{"train": gamma, "test": b, "seed": seed} for b in others]
    return found


def needs(config: Config, unit: Key) -> list[Key]:
    """The network that is tested must be trained."""
    own = {"train": unit["train"], "test": unit["train"], "seed": unit["seed"]}
    return [] if own == unit else [own]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    seed, path = unit["seed"], context.folder / "weights" / f"{unit['train']:g}-{unit['seed']}.pt"
    source = Resident(small_set(config.data), config.batch, seed=seed, device=context.device, limit=config.limit)
    torch.manual_seed(seed)
    net = build(
        config.model, classes=source.classes, channels=source.channels, gamma=run_as(config, unit["test"]), velocity=config.velocity,
        memory=config.memory if unit["test"] or config.memory != "reverse" else "checkpoint", residual=config.residual,
    )  # fmt: skip
    if unit["train"] == unit["test"]:
        x = next(iter(source.test()))[0][:LOOKED_AT]
        recipe = _recipe(config, "trained")
        _, curve = trained(net, recipe, source, context, lambda net: sizes(net, x))
        if unit["train"] in ends(config):
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_weights(net, path)
        return {"accuracy": curve["accuracy"][-1], "efolds": efolds(recipe, source.steps), **curve_of(curve)}
    return _tested(config, net, kept_weights(path), source, context)


def curve_of(curve: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What is kept of each epoch, rounded: losses, accuracies, and two numbers for every block."""
    short = {name: [[round(value, 5) for value in epoch] for epoch in curve[name]] for name in ("share", "scale")}
    rounded = {name: [round(value, 5) for value in curve[name]] for name in ("train_loss", "test_loss")}
    return {"accuracies": curve["accuracy"], **rounded, **short}


def run_as(config: Config, gamma: float) -> float:
    return NEARLY_ONE if gamma == 1 and config.residual == "relu" else gamma


def _recipe(config: Config, phase: str) -> Recipe:
    refit = {"epochs": config.refit, "rate": config.refit_rate, "schedule": "cosine"} if phase == "refit" else {}
    return config.recipe(**refit)


def _tested(
    config: Config, net: nn.Module, weights: dict[str, Any], source: Resident, context: Context
) -> dict[str, Any]:
    """The accuracy with another γ: as it is, with new statistics, and refitted."""
    net.load_state_dict(dict(weights))  # of another γ: that is the experiment
    learner = Learner(net.to(context.device), _recipe(config, "refit" if config.refit else "trained"), source.steps)
    with fast(context.device):
        plain = learner.evaluate(source)["accuracy"]
        statistics_anew(learner, source)
        anew = learner.evaluate(source)["accuracy"]
    found = {"plain": plain, "statistics": anew}
    if config.refit:
        net.load_state_dict(dict(weights))  # of another γ: that is the experiment
        _, curve = trained(net, _recipe(config, "refit"), source, context)
        found["refit"] = curve["accuracy"][-1]
    return found


@torch.no_grad()
def statistics_anew(learner: Learner, source: Resident, batches: int = 50) -> None:
    """BatchNorm's statistics as the mean over some training batches, of the network as it is now."""
    norms = [m for m in learner.net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    learner.net.train()
    for (x, _), _ in zip(source.epoch(0), range(batches), strict=False):
        with learner._autocast():
            learner._forward(x)
    for norm in norms:
        norm.momentum = 0.1


def figure(config: Config, records: list[Record]) -> Any:
    curves = [r for r in records if r["train"] == r["test"] and r["train"] in ends(config) and "share" in r.values]
    if curves:
        picture, (axis, side) = canvas(10.5, 4, 1, 2, width_ratios=(3, 2))
        _draw_shares(side, curves)
    else:
        picture, axis = canvas(7.6, 4)

    def draw(curve: dict[float, list[float]], line: str, colour: str, name: str, **look: Any) -> None:
        axis.plot(list(curve), [mean(v) for v in curve.values()], line, color=colour, label=name, **look)
        for gamma, values in curve.items():
            if values[1:]:
                axis.plot([gamma] * len(values), values, ".", color=colour, markersize=3, alpha=0.5)  # each seed

    own = _own(records)
    for end, colour in zip(ends(config), ENDS, strict=True):
        if own.get(end):
            best, name = mean(own[end]), f"γ = {end:g}, at most {BARS['plain']} % lost: the paper"
            axis.axhspan(best - BARS["plain"], best, color=colour, alpha=0.15, linewidth=0, zorder=0, label=name)
    for end, colour in zip(ends(config), ENDS, strict=True):
        for name, (key, line) in WAYS.items():
            curve = _other(records, end, key)
            if curve:  # joined to the point where it was trained
                curve = dict(sorted({**curve, end: own.get(end, [])}.items())) if own.get(end) else curve
                draw(curve, line, colour, f"γ = {end:g}, {name}", **LOOKS[key])
    draw(own, "s-" if len(own) > 2 else "s", "#111827", "trained with γ = γ′", markersize=4, zorder=4)
    axis.set(xlabel="γ′ at test time", ylabel="test accuracy, %", title=f"{config.model}, {config.data}")
    where: dict[str, Any] = {"loc": "best"} if curves else {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axis.legend(fontsize=8, handlelength=4, **where)  # long enough to tell dashes from dots
    return picture


def _draw_shares(axis: Any, records: list[Record]) -> None:
    """How large each block's f is beside its x, at the end of the training."""
    for record in records:
        colour = ENDS[record["train"] == max(r["train"] for r in records)]
        label = f"trained with γ = {record['train']:g}" if record["seed"] == 0 else None
        share = record["share"][-1]
        axis.plot(range(1, len(share) + 1), share, "o-", color=colour, markersize=3, linewidth=1, label=label)
    axis.set(xlabel="block that takes a momentum step", ylabel="‖f‖ / ‖x‖ after training", yscale="log")
    axis.legend(fontsize=8)


def _own(records: list[Record]) -> dict[float, list[float]]:
    """The accuracies of networks tested with the γ they were trained with, by γ."""
    return _by_test([r for r in records if r["train"] == r["test"]], "accuracy")


def _other(records: list[Record], end: float, key: str) -> dict[float, list[float]]:
    """The accuracies of those trained with γ = `end` and tested with another, by that one."""
    return _by_test([r for r in records if r["train"] == end != r["test"] and key in r.values], key)


def _by_test(records: list[Record], key: str) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for record in sorted(records, key=lambda r: r["test"]):
        found.setdefault(record["test"], []).append(record[key])
    return found


def findings(config: Config, records: list[Record]) -> list[Finding]:
    every = _own(records)
    if not every:
        return []
    own = {gamma: mean(values) for gamma, values in every.items()}
    found = [Finding("accuracy over γ, trained with each", f"{min(own.values()):.2f} to {max(own.values()):.2f} %")]
    for end in ends(config):
        if end in every:
            found.append(Finding(f"accuracy, γ = {end:g}", spread(every[end], unit=" %")))
            found += _shares(records, end)
        for name, (key, _) in WAYS.items():
            curve = {gamma: mean(values) for gamma, values in _other(records, end, key).items()}
            if curve and end in own:
                # as it is: against γ′ = γ; refitted: against a network trained with γ′
                lost = {
                    g: own[g if key == "refit" else end] - value
                    for g, value in curve.items()
                    if key != "refit" or g in own
                }
                short = {g: value for g, value in lost.items() if g < 1}  # at 1 only the first f of a stage is left
                kinds = {"": lost, ", γ′ < 1": short if key == "refit" and short != lost else {}}
                found += [
                    _most(f"most lost from γ = {end:g}, {name}{k}", v, BARS.get(key)) for k, v in kinds.items() if v
                ]
    return found


def _shares(records: list[Record], end: float) -> list[Finding]:
    """How large the branches are at the end of a training with this γ."""
    last = [record["share"][-1] for record in _trained(records, end) if "share" in record.values]
    if not last:
        return []
    largest, middle = [max(values) for values in last], [median(values) for values in last]
    scales = [max(record["scale"][-1]) for record in _trained(records, end) if "scale" in record.values]
    decayed = mean(math.exp(-record["efolds"]) for record in _trained(records, end))
    name = f"scale of f's BatchNorm after training with γ = {end:g}, largest of a block"
    return [
        Finding(name, f"{spread(scales, '.3f')} (by weight decay alone {decayed:.3f})"),
        Finding(f"‖f‖/‖x‖ after training with γ = {end:g}, largest of a block", spread(largest, ".3f")),
        Finding(f"‖f‖/‖x‖ after training with γ = {end:g}, median of the blocks", spread(middle, ".3f")),
    ]


def _trained(records: list[Record], gamma: float) -> list[Record]:
    return [r for r in records if r["train"] == r["test"] == gamma]


def _most(name: str, lost: dict[float, float], bar: int | None) -> Finding:
    worst = max(lost, key=lambda g: lost[g])
    ours = f"{lost[worst]:.2f} % (at γ′ = {worst:g})"
    return Finding(name, ours) if bar is None else Finding(name, ours, f"≤ {bar} %", lost[worst] <= bar)
