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
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

import retrograde as rg

from .data.batches import Resident
from .findings import Finding, compared, spread
from .metrics import Key, Record
from .private import human
from .run import Context
from .style import COLOURS, MARKERS, canvas
from .train import build
from .train.unit import Training, small_set, trained

MARGIN = 1.0  # %: accuracies that differ by less are called flat


@dataclass(frozen=True)
class Config(Training):
    decisive: ClassVar[tuple[str, ...]] = ("data", "model", "residual", "epochs", "batch", "rate", "schedule", "limit")

    data: str = "cifar10"
    model: str = "resnet101"
    gammas: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    repeats: int = 3
    narrow: tuple[float, ...] = ()  # γ trained with 16 bits too; needs AMP
    narrow_repeats: int = 3

    @classmethod
    def default(cls) -> Config:
        return cls(
            model="thin-resnet56",
            epochs=10,
            batch=512,
            rate=0.4,
            schedule="onecycle",
            amp="bf16",
            narrow=(0.9,),
            repeats=1,
        )

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", model="thin-resnet26", gammas=(0.0, 0.1, 0.9), epochs=1, batch=64, rate=0.1, schedule="onecycle",
            limit=128, channels_last=False, amp="bf16", narrow=(0.9,), narrow_repeats=2, repeats=1,
        )  # fmt: skip

    def setting(self) -> str:
        narrow = ", ".join(f"{gamma:g}" for gamma in self.narrow)
        more = f"; with γ = {narrow} also with 16 bits, {self.narrow_repeats} seeds each" if narrow else ""
        return (
            f"{self.model} on {self.data}, v₀ = 0, in reverse, {self.trained_as()}{more}; memory of one step of that batch. "
            "The paper: ResNet-101, 220 epochs of batch 128."
        )


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
    """Accuracy over memory, a point for each γ, with the spread of its seeds. The ResNet stands apart at the right."""
    picture, axis = canvas(7, 4)
    accuracy, peak = means(records, "accuracy"), means(records, "peak")
    for gamma, middle in accuracy.items():
        values = [r["accuracy"] for r in of(records, gamma)]
        _point(axis, peak[gamma], values, "resnet" if not gamma else "momentum")
        axis.annotate(
            f" {gamma:g}" if gamma else " ResNet (γ = 0)", (peak[gamma] / 1e6, middle), fontsize=9, va="bottom"
        )
    for gamma in config.narrow:
        if found := of(records, gamma, 16):
            _point(axis, mean(r["peak"] for r in found), [r["accuracy"] for r in found], "revnet")
            place = mean(r["peak"] for r in found) / 1e6, mean(r["accuracy"] for r in found)
            axis.annotate(f"{gamma:g}, 16 bits ", place, ha="right", va="center", fontsize=9)
    axis.set(xlabel="peak memory of a training step, MB", ylabel="test accuracy, %", xscale="log")
    axis.set_title(
        f"{config.model}, {config.data}; numbers: γ. Buffers grow by whole bytes, so memory hardly depends on γ",
        fontsize=9.5,
    )
    if peak:
        ticks = [
            t
            for t in (50, 100, 200, 300, 500, 1000, 2000, 5000)
            if 0.6e-6 * min(peak.values()) < t < 1.6e-6 * max(peak.values())
        ]
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.set_xticks([], minor=True)
        axis.margins(x=0.2)
    axis.grid(alpha=0.25)
    return picture


def _point(axis: Any, peak: float, values: list[float], kind: str) -> None:
    error = stdev(values) if len(values) > 1 else None
    axis.errorbar(peak / 1e6, mean(values), error, fmt=MARKERS[kind], color=COLOURS[kind], capsize=3, markersize=7)


def findings(config: Config, records: list[Record]) -> list[Finding]:
    accuracy, peak = means(records, "accuracy"), means(records, "peak")
    momentum = [g for g in accuracy if g]
    if not momentum:
        return []
    found = [
        Finding(f"accuracy, γ = {g:g}", spread([r["accuracy"] for r in of(records, g)], ".2f", " %")) for g in accuracy
    ]
    least, most = min(momentum, key=lambda g: accuracy[g]), max(momentum, key=lambda g: accuracy[g])
    if least != most:
        pair = ({r["seed"]: r["accuracy"] for r in of(records, g)} for g in (most, least))
        ours, theirs = pair
        both = sorted(ours.keys() & theirs.keys())
        if both:
            name = f"accuracy, best γ less worst ({most:g}, {least:g})"
            found.append(compared(name, [ours[s] for s in both], [theirs[s] for s in both], most=MARGIN))
    peaks = f"{human(min(peak[g] for g in momentum))} to {human(max(peak[g] for g in momentum))}"
    found.append(Finding("peak memory over γ > 0", peaks))
    if 0 in peak:
        found.append(Finding("peak memory, the ResNet", human(peak[0])))
    for gamma in config.narrow:
        wide, slim = of(records, gamma), of(records, gamma, 16)
        if wide and slim:
            found += _narrow(config, gamma, wide, slim)
    return found


def _narrow(config: Config, gamma: float, wide: list[Record], slim: list[Record]) -> list[Finding]:
    """The state in 16 bits against the usual one: accuracy, and memory."""
    ours, theirs = ({r["seed"]: r["accuracy"] for r in part} for part in (slim, wide))
    both = sorted(ours.keys() & theirs.keys())
    peaks = f"{human(mean(r['peak'] for r in slim))} : {human(mean(r['peak'] for r in wide))}"
    count = f" ({len(ours)} of {config.narrow_repeats} seeds)" if len(ours) < config.narrow_repeats else ""
    said = Finding(f"accuracy with 16 bits, γ = {gamma:g}", spread(list(ours.values()), ".2f", " %") + count)
    name = f"16 bits less 32, γ = {gamma:g}"
    test = [compared(name, [ours[s] for s in both], [theirs[s] for s in both], least=-MARGIN)] if both else []
    return [said, *test, Finding(f"peak memory, 16 bits : 32, γ = {gamma:g}", peaks)]
