"""Table 2 and App. F: accuracy on CIFAR of a ResNet and of Momentum ResNets with v₀ = 0 and v₀ = f(x₀), trained identically.

    ResNet   x ← x + f(x)          Momentum   v ← γ·v + (1−γ)·f(x), x ← x + v, γ = 0.9, for all blocks that keep their shape

As in the paper's published code the blocks of the ResNet end in a ReLU, and those that take a momentum step do not (residual="branch").

The paper has v₀ = f(x₀, θ₀), of the first block, in its text, and "learned" in its experiment, which in the published code is a
block of its own in every stage: both are run. For a seed all start from the same weights and see the same batches. The default
preset is a shortened schedule (one cycle of the rate, bfloat16, smoothed labels) of a ResNet-34, whose activations are stored,
since the mode changes no result and storing is fastest; the paper's preset is the paper's, run in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from statistics import mean
from typing import Any, ClassVar

import torch

from .data.batches import Resident
from .errors import ExperimentError
from .findings import Finding, compared, spread
from .metrics import Key, Record
from .run import Context
from .style import COLOURS, PAPER, canvas
from .train import build
from .train.unit import Training, parameters, small_set, trained

NETS = {
    "resnet": "ResNet",
    "momentum": "Momentum, v₀ = 0",
    "momentum-first": "Momentum, v₀ = f(x₀) of block 1",
    "momentum-learned": "Momentum, v₀ = f(x₀) learned",
}
VELOCITIES = {"momentum-first": "first", "momentum-learned": "learned"}
LINES = {"momentum-first": "--", "momentum-learned": "-."}
MARGIN = 0.5  # %: networks whose accuracies differ by less are called equal
INSET = 8  # last epochs, shown larger
PAPERS = {"cifar10": 100 - 95.15, "cifar100": 100 - 76.86}  # the paper's errors of the ResNet, %
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


@dataclass(frozen=True)
class Config(Training):
    decisive: ClassVar[tuple[str, ...]] = (
        "data",
        "model",
        "residual",
        "gamma",
        "epochs",
        "batch",
        "rate",
        "schedule",
        "limit",
    )

    data: tuple[str, ...] = ("cifar10", "cifar100")
    nets: tuple[str, ...] = tuple(NETS)
    model: str = "resnet101"
    gamma: float = 0.9
    memory: str = "reverse"
    decay: str = "all"  # or "weights": neither norms nor biases
    nesterov: bool = False
    smoothing: float = 0.0  # of labels
    warmup: float = 0.0  # epochs; onecycle: 30 % of them unless given
    graph: bool = False  # forward and backward as a CUDA graph
    repeats: int = 10

    @classmethod
    def default(cls) -> Config:
        return cls(
            data=("cifar10",), model="resnet34", memory="store", epochs=24, batch=256, rate=0.2, schedule="onecycle", nesterov=True,
            smoothing=0.1, warmup=5, amp="bf16", repeats=3,
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data=("digits",), model="thin-resnet14", epochs=2, batch=64, rate=0.1, schedule="onecycle", limit=256,
            channels_last=False, repeats=1,
        )  # fmt: skip

    def setting(self) -> str:
        more = (
            (", decay of neither norms nor biases" if self.decay == "weights" else "")
            + (", Nesterov's momentum" if self.nesterov else "")
            + (f", labels smoothed by {self.smoothing:g}" if self.smoothing else "")
            + (f", {self.warmup:g} epochs of warm-up" if self.warmup else "")
        )
        return (
            f"{self.model} on {' and '.join(self.data)}, γ = {self.gamma:g}, {self.trained_as()}{more}, memory={self.memory}. "
            "The paper: ResNet-101, 220 epochs of batch 128, 10 seeds, float32."
        )


def units(config: Config) -> list[Key]:
    if unknown := [net for net in config.nets if net not in NETS]:
        raise ExperimentError(f"there is no net {unknown[0]!r} here; there are {', '.join(NETS)}.")
    return [
        {"data": d, "net": net, "seed": s} for d in config.data for s in range(config.repeats) for net in config.nets
    ]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    images = small_set(unit["data"])
    source = Resident(images, config.batch, seed=unit["seed"], device=context.device, limit=config.limit)
    torch.manual_seed(unit["seed"])
    gamma, memory = (0.0, "store") if unit["net"] == "resnet" else (config.gamma, config.memory)
    net = build(
        config.model, classes=source.classes, channels=source.channels, gamma=gamma, memory=memory,
        velocity=VELOCITIES.get(unit["net"], "zero"), residual="relu" if unit["net"] == "resnet" else config.residual,
    )  # fmt: skip
    _, curve = trained(net, config.recipe(), source, context)
    return {**curve, "final": curve["accuracy"][-1], "parameters": parameters(net)}


def finals(records: list[Record], data: str, net: str) -> dict[int, float]:
    """The last accuracy of each seed."""
    return {r["seed"]: r["final"] for r in records if r["data"] == data and r["net"] == net}


def figure(config: Config, records: list[Record]) -> Any:
    """Error and loss over the epochs: the mean over the seeds, from the least to the most; the last epochs once more, larger."""
    from matplotlib.ticker import LogLocator

    picture, axes = canvas(9.6, 3.8 * len(config.data), len(config.data), 2, squeeze=False)
    for row, data in zip(axes, config.data, strict=True):
        inset = row[0].inset_axes((0.42, 0.5, 0.56, 0.46)) if config.epochs > 2 * INSET else None
        for net, name in NETS.items():
            runs = [r for r in records if r["data"] == data and r["net"] == net]
            if runs:
                errors = [[100 - a for a in r["accuracy"]] for r in runs]
                _band(row[0], errors, net, name)
                if inset is not None:
                    _band(inset, [e[-INSET:] for e in errors], net, "", config.epochs - INSET)
                final = spread([r["final"] for r in runs], ".2f", " %")
                _band(row[1], [r["test_loss"] for r in runs], net, f"{name}: {final}")
        row[0].set(
            xlabel="epoch", ylabel="test error, %", yscale="log", title=f"{TITLES.get(data, data)}, {config.model}"
        )
        row[1].set(xlabel="epoch", ylabel="test loss", yscale="log")
        for axis in row:
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
        if inset is not None:
            inset.tick_params(labelsize=8)
            said = PAPERS.get(data)
            if said:
                inset.axhline(said, **PAPER)
                inset.annotate(
                    "the paper's ResNet", (0.02, said), xycoords=("axes fraction", "data"), fontsize=7.5, va="bottom"
                )
        if row[1].lines:
            row[1].legend(title="final accuracy", loc="upper right")
    return picture


def _band(axis: Any, runs: list[list[float | None]], net: str, label: str, before: int = 0) -> None:
    """The mean over the seeds, and from the least to the most."""
    known = [[nan if value is None else value for value in run] for run in runs]  # null: it was not finite
    columns, colour, line = list(zip(*known, strict=True)), COLOURS[net], LINES.get(net, "-")
    epochs = range(before + 1, before + len(columns) + 1)
    axis.plot(epochs, [mean(c) for c in columns], line, color=colour, label=label)
    axis.fill_between(
        epochs, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0
    )


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for data in config.data:
        title, plain = TITLES.get(data, data), finals(records, data, "resnet")
        for net, name in NETS.items():
            ours = finals(records, data, net)
            if ours:
                found.append(Finding(f"{title}, {name}", spread(list(ours.values()), ".2f", " %")))
            both = sorted(ours.keys() & plain.keys())
            if net != "resnet" and both:
                pair = ([of[seed] for seed in both] for of in (ours, plain))
                # what the paper does not have is only told
                asked = (-MARGIN, MARGIN) if net != "momentum-first" else (-inf, inf)
                found.append(compared(f"{title}, {name}, less the ResNet's", *pair, least=asked[0], most=asked[1]))
    return found
