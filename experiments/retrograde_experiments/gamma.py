"""Fig. 6, top: Momentum ResNets trained with one γ and tested with another, as they are and after a short refit.

    trained    one network for every γ
    tested     those trained with the least and with the largest γ, with every other γ: as they are; with BatchNorm's statistics
               found anew; and after a few epochs of training (refit)

v₀ = f(x₀), so that γ near 1 (where f enters with the factor 1 − γ) still is a network: x_n → x₀ + n·f(x₀). The paper's γ = 1 is run
as 0.9999; `gamma=1` of this library is another thing, the limit with f scaled by 1/(1 − γ).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

from .data.batches import Resident
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context
from .style import canvas
from .train import Learner, Recipe, build
from .train.learner import fast
from .train.unit import keep_weights, kept_weights, small_set, trained

NEARLY_ONE = 0.9999
BARS = {"plain": 3, "refit": 1}  # of accuracy lost at most, in %
WAYS = {"as it is": ("plain", ":"), "statistics anew": ("statistics", "--"), "refit": ("refit", "-")}


@dataclass(frozen=True)
class Config:
    data: str = "cifar10"
    model: str = "resnet101"
    gammas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
    velocity: str = "first"
    memory: str = "auto"
    epochs: int = 220
    refit: int = 20
    batch: int = 128
    rate: float = 0.01
    schedule: str = "multistep"
    milestones: tuple[int, ...] = (180,)
    refit_rate: float = 0.001
    amp: str = "off"
    channels_last: bool = True
    limit: int | None = None
    repeats: int = 1

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(
            model="resnet34", gammas=(0.0, 0.25, 0.5, 0.75, 0.9, 1.0), memory="store", epochs=8, refit=3, batch=256, rate=0.2,
            schedule="onecycle", refit_rate=0.02, amp="bf16",
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", model="thin-resnet14", gammas=(0.0, 0.9, 1.0), epochs=2, refit=1, batch=64, rate=0.1, schedule="onecycle",
            refit_rate=0.01, limit=192, channels_last=False,
        )  # fmt: skip

    def setting(self) -> str:
        smaller = "" if self == Config.paper() else " The paper: ResNet-101, 220 epochs, refit of 20."
        return (
            f"{self.model} on {self.data}, v₀ = {'f(x₀)' if self.velocity == 'first' else '0'}, {self.epochs} epochs of batch "
            f"{self.batch} (rate {self.rate:g}, {self.schedule}), refit of {self.refit} epochs (rate {self.refit_rate:g} falling to "
            f"0), AMP {self.amp}, {self.repeats} seed(s); γ = 1 is run as {NEARLY_ONE}.{smaller}"
        )


def ends(config: Config) -> tuple[float, float]:
    """The γ of the networks that are tested with others."""
    return min(config.gammas), max(config.gammas)


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    for seed in range(config.repeats):
        found += [{"train": gamma, "test": gamma, "seed": seed} for gamma in config.gammas]
        found += [{"train": a, "test": b, "seed": seed} for a in ends(config) for b in config.gammas if a != b]
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
        config.model, classes=source.classes, channels=source.channels, gamma=run_as(unit["test"]), velocity=config.velocity,
        memory=config.memory if unit["test"] or config.memory != "reverse" else "checkpoint",
    )  # fmt: skip
    if unit["train"] == unit["test"]:
        _, curve = trained(net, _recipe(config, "trained"), source, context)
        if unit["train"] in ends(config):
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_weights(net, path)
        return {"accuracy": curve["accuracy"][-1]}
    return _tested(config, net, kept_weights(path), source, context)


def run_as(gamma: float) -> float:
    return NEARLY_ONE if gamma == 1 else gamma


def _recipe(config: Config, phase: str) -> Recipe:
    common: dict[str, Any] = {"batch": config.batch, "amp": config.amp, "channels_last": config.channels_last}
    if phase == "refit":
        return Recipe(epochs=config.refit, rate=config.refit_rate, schedule="cosine", **common)
    return Recipe(
        epochs=config.epochs, rate=config.rate, schedule=config.schedule, milestones=config.milestones, **common
    )


def _tested(
    config: Config, net: nn.Module, weights: dict[str, Any], source: Resident, context: Context
) -> dict[str, Any]:
    """The accuracy with another γ: as it is, with new statistics, and refitted."""
    net.load_state_dict(weights)
    learner = Learner(net.to(context.device), _recipe(config, "refit"), source.steps)
    with fast(context.device):
        plain = learner.evaluate(source)["accuracy"]
        statistics_anew(learner, source)
        anew = learner.evaluate(source)["accuracy"]
    net.load_state_dict(weights)
    _, curve = trained(net, _recipe(config, "refit"), source, context)
    return {"plain": plain, "statistics": anew, "refit": curve["accuracy"][-1]}


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
    picture, axis = canvas(7.6, 4)

    def draw(curve: dict[float, list[float]], line: str, colour: str, name: str) -> None:
        axis.plot(list(curve), [mean(v) for v in curve.values()], line, color=colour, label=name, markersize=4)
        for gamma, values in curve.items():
            if values[1:]:
                axis.plot([gamma] * len(values), values, ".", color=colour, markersize=3, alpha=0.5)  # each seed

    draw(_own(records), "o-", "#111827", "trained with γ = γ′")
    for end, colour in zip(ends(config), ("#6b7280", "#ea580c"), strict=True):
        for name, (key, line) in WAYS.items():
            draw(_other(records, end, key), f"o{line}", colour, f"γ = {end:g}, {name}")
    axis.set(xlabel="γ′ at test time", ylabel="test accuracy, %", title=f"{config.model}, {config.data}")
    axis.legend(
        fontsize=8, handlelength=4, loc="center left", bbox_to_anchor=(1, 0.5)
    )  # long enough to tell dashes from dots
    return picture


def _own(records: list[Record]) -> dict[float, list[float]]:
    """The accuracies of networks tested with the γ they were trained with, by γ."""
    return _by_test([r for r in records if r["train"] == r["test"]], "accuracy")


def _other(records: list[Record], end: float, key: str) -> dict[float, list[float]]:
    """The accuracies of those trained with γ = `end` and tested with another, by that one."""
    return _by_test([r for r in records if r["train"] == end != r["test"]], key)


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
        for name, (key, _) in WAYS.items():
            curve = {gamma: mean(values) for gamma, values in _other(records, end, key).items()}
            if curve and end in own:
                # as it is: against γ′ = γ; refitted: against a network trained with γ′
                lost = {g: (own[g] if key == "refit" else own[end]) - value for g, value in curve.items() if g in own}
                short = {g: value for g, value in lost.items() if g < 1}  # at 1 only the first f of a stage is left
                kinds = {"": lost, ", γ′ < 1": short if key == "refit" and short != lost else {}}
                found += [
                    _most(f"most lost from γ = {end:g}, {name}{k}", v, BARS.get(key)) for k, v in kinds.items() if v
                ]
    return found


def _most(name: str, lost: dict[float, float], bar: int | None) -> Finding:
    worst = max(lost, key=lambda g: lost[g])
    ours = f"{lost[worst]:.2f} % (at γ′ = {worst:g})"
    return Finding(name, ours) if bar is None else Finding(name, ours, f"≤ {bar} %", lost[worst] <= bar)
