"""Fig. 7, bottom: final accuracy on CIFAR-10 of Momentum ResNets against the memory they train in, over γ.

The nearer γ is to 1, the fewer bits each layer loses and the smaller the buffer that keeps them: k·log₂(1/γ) bits per element at
depth k, here in whole 1, 2 or 4 bytes. Memory is the peak of one training step above parameters, gradients and batch, measured
on the trained network; the ResNet (γ = 0, everything stored) stands beside it.

For the γ of `narrow` the same networks are trained once more with x and v in 16 bits, which mixed precision allows: over several seeds,
so that a loss of accuracy would show.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import retrograde as rg

from .data.batches import Resident
from .findings import Finding, spread
from .metrics import Key, Record
from .private import human
from .run import Context
from .style import COLOURS, canvas
from .train import Recipe, build
from .train.models import FORMS
from .train.unit import small_set, trained


@dataclass(frozen=True)
class Config:
    data: str = "cifar10"
    model: str = "resnet101"
    residual: str = (
        "branch"  # of the momentum networks: the paper's published form, or "relu", He's; the ResNet is He's
    )
    gammas: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    epochs: int = 220
    batch: int = 128
    rate: float = 0.01
    schedule: str = "multistep"
    milestones: tuple[int, ...] = (180,)
    amp: str = "off"
    channels_last: bool = True
    limit: int | None = None
    repeats: int = 1
    narrow: tuple[float, ...] = ()  # γ trained with 16 bits too; needs AMP
    narrow_repeats: int = 3

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(
            model="thin-resnet56", epochs=10, batch=512, rate=0.4, schedule="onecycle", amp="bf16", narrow=(0.9,)
        )

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", model="thin-resnet26", gammas=(0.0, 0.1, 0.9), epochs=1, batch=64, rate=0.1, schedule="onecycle",
            limit=128, channels_last=False, amp="bf16", narrow=(0.9,), narrow_repeats=2,
        )  # fmt: skip

    def setting(self) -> str:
        smaller = "" if self == Config.paper() else " The paper: ResNet-101, 220 epochs of batch 128."
        narrow = ", ".join(f"{gamma:g}" for gamma in self.narrow)
        more = f"; with γ = {narrow} also with 16 bits, {self.narrow_repeats} seeds each" if narrow else ""
        return (
            f"{self.model} on {self.data}, {FORMS[self.residual]}, v₀ = 0, in reverse, {self.epochs} epochs of batch "
            f"{self.batch} (rate {self.rate:g}, {self.schedule}), AMP {self.amp}, "
            f"{self.repeats} seed(s){more}; memory of one step of that batch.{smaller}"
        )

    def recipe(self) -> Recipe:
        names = ("epochs", "batch", "rate", "schedule", "milestones", "amp", "channels_last")
        return Recipe(**{name: getattr(self, name) for name in names})


def units(config: Config) -> list[Key]:
    found: list[Key] = [{"gamma": gamma, "seed": seed} for seed in range(config.repeats) for gamma in config.gammas]
    for seed in range(config.narrow_repeats):
        for own in ({"gamma": gamma, "seed": seed} for gamma in config.narrow):
            found += [unit for unit in (own, {**own, "bits": 16}) if unit not in found]
    return found


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    source = Resident(
        small_set(config.data), config.batch, seed=unit["seed"], device=context.device, limit=config.limit
    )
    torch.manual_seed(unit["seed"])
    memory = "reverse" if unit["gamma"] else "store"
    net = build(
        config.model, classes=source.classes, channels=source.channels, gamma=unit["gamma"], memory=memory,
        fixed_point="int16" if unit.get("bits") == 16 else "auto",
        residual=config.residual if unit["gamma"] else "relu",
    )  # fmt: skip
    learner, curve = trained(net, config.recipe(), source, context)
    x, y = next(source.epoch(0))

    def step(output: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.float(), y)

    with learner._autocast():
        report = rg.measure(net, x if config.channels_last else x.contiguous(), loss=step, repeats=1)
    return {"accuracy": curve["accuracy"][-1], "peak": report.peak, "held": report.held}


def of(records: list[Record], gamma: float, bits: int | None = None) -> list[Record]:
    """Those with this γ; bits None: with the usual state."""
    return [r for r in records if r["gamma"] == gamma and r.key.get("bits") == bits]


def means(records: list[Record], name: str) -> dict[float, float]:
    """By γ, with the usual state."""
    records = [r for r in records if "bits" not in r.key]
    gammas = sorted({r["gamma"] for r in records})
    return {gamma: mean(r[name] for r in records if r["gamma"] == gamma) for gamma in gammas}


def figure(config: Config, records: list[Record]) -> Any:
    picture, axis = canvas(6, 3.6)
    accuracy, peak = means(records, "accuracy"), means(records, "peak")
    shades = shades_of(len(accuracy))
    for gamma, shade in zip(accuracy, shades, strict=True):
        plain = {"marker": "s", "color": COLOURS["resnet"], "label": "ResNet (γ = 0, stored)"}
        style = {"marker": "o", "color": shade, "label": f"Momentum, γ = {gamma:g}"} if gamma else plain
        axis.plot([peak[gamma] / 1e6], [accuracy[gamma]], linestyle="none", markersize=7, **style)
    for gamma in config.narrow:
        if found := of(records, gamma, 16):
            label = f"the same, γ = {gamma:g}, 16 bits"
            place = [mean(r["peak"] for r in found) / 1e6], [mean(r["accuracy"] for r in found)]
            axis.plot(*place, linestyle="none", marker="D", markersize=6, color="#0f766e", label=label)
    if not accuracy:
        return picture
    middle, room = mean(accuracy.values()), max(3.0, max(accuracy.values()) - min(accuracy.values()))
    axis.set(
        xlabel="peak memory of a training step, MB", ylabel="test accuracy, %", title=f"{config.model}, {config.data}"
    )
    axis.set(xlim=(0, 1.1e-6 * max(peak.values())), ylim=(middle - room, middle + room))
    axis.legend(fontsize=8, loc="lower right", ncols=2)
    return picture


def shades_of(count: int) -> list[Any]:
    """Shades of the momentum networks' colour, from light to dark."""
    from matplotlib import colormaps

    return [colormaps["Oranges"](0.3 + 0.7 * k / max(1, count - 1)) for k in range(count)]


def findings(config: Config, records: list[Record]) -> list[Finding]:
    accuracy, peak = means(records, "accuracy"), means(records, "peak")
    momentum = [g for g in accuracy if g]
    if not momentum:
        return []
    least, most = min(accuracy[g] for g in momentum), max(accuracy[g] for g in momentum)
    found = [
        Finding("accuracy over γ", f"{least:.2f} to {most:.2f} %", "flat: within 2 %", most - least <= 2),
        Finding(
            "peak memory over γ", f"{human(min(peak[g] for g in momentum))} to {human(max(peak[g] for g in momentum))}"
        ),
    ]
    if 0 in accuracy:
        found.append(Finding("the ResNet: accuracy, peak memory", f"{accuracy[0]:.2f} %, {human(peak[0])}"))
    for gamma in config.narrow:
        wide, slim = of(records, gamma), of(records, gamma, 16)
        if wide and slim:
            found += _narrow(config, gamma, wide, slim)
    return found


def _narrow(config: Config, gamma: float, wide: list[Record], slim: list[Record]) -> list[Finding]:
    """The state in 16 bits against the usual one: accuracy, and memory."""
    ours, theirs = ([r["accuracy"] for r in part] for part in (slim, wide))
    gap, room = mean(ours) - mean(theirs), sum(stdev(v) if len(v) > 1 else 0.0 for v in (ours, theirs))
    enough = min(len(ours), len(theirs)) >= 3
    peaks = f"{human(mean(r['peak'] for r in slim))} : {human(mean(r['peak'] for r in wide))}"
    seeds = [f" ({len(v)} of {config.narrow_repeats} seeds)" * (len(v) < config.narrow_repeats) for v in (ours, theirs)]
    return [
        Finding(f"accuracy with 16 bits, γ = {gamma:g}", spread(ours, ".2f", " %") + seeds[0]),
        Finding(f"accuracy with 32 bits, γ = {gamma:g}", spread(theirs, ".2f", " %") + seeds[1]),
        Finding(
            f"16 bits less 32, γ = {gamma:g}", f"{gap:+.2f} %",
            f"≥ −{room:.2f} %, the seeds' spread" if enough else "within the seeds' spread",
            gap >= -room if enough else None,
        ),
        Finding(f"peak memory, 16 bits : 32, γ = {gamma:g}", peaks),
    ]  # fmt: skip
