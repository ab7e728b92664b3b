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
from math import nan
from statistics import mean, stdev
from typing import Any

import torch

from .data.batches import Resident
from .errors import ExperimentError
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context
from .style import COLOURS, canvas
from .train import Recipe, build
from .train.models import FORMS
from .train.unit import parameters, small_set, trained

NETS = {
    "resnet": "ResNet",
    "momentum": "Momentum, v₀ = 0",
    "momentum-first": "Momentum, v₀ = f(x₀) of block 1",
    "momentum-learned": "Momentum, v₀ = f(x₀) learned",
}
VELOCITIES = {"momentum-first": "first", "momentum-learned": "learned"}
TINTS = {
    "resnet": COLOURS["resnet"],
    "momentum": COLOURS["momentum"],
    "momentum-first": "#b45309",
    "momentum-learned": "#7c3aed",
}
LINES = {"momentum-first": "--", "momentum-learned": ":"}
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


@dataclass(frozen=True)
class Config:
    data: tuple[str, ...] = ("cifar10", "cifar100")
    nets: tuple[str, ...] = tuple(NETS)
    model: str = "resnet101"
    residual: str = (
        "branch"  # of the momentum networks: the paper's published form, or "relu", He's; the ResNet is He's
    )
    gamma: float = 0.9
    memory: str = "reverse"
    epochs: int = 220
    batch: int = 128
    rate: float = 0.01
    schedule: str = "multistep"
    milestones: tuple[int, ...] = (180,)
    weight_decay: float = 5e-4
    decay: str = "all"  # or "weights": neither norms nor biases
    nesterov: bool = False
    smoothing: float = 0.0  # of labels
    warmup: float = 0.0  # epochs; onecycle: 30 % of them unless given
    amp: str = "off"
    channels_last: bool = True
    graph: bool = False  # forward and backward as a CUDA graph
    limit: int | None = None  # training images
    repeats: int = 10

    @classmethod
    def paper(cls) -> Config:
        return cls()

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
        schedule = (
            f"÷10 at epoch {', '.join(map(str, self.milestones))}"
            if self.schedule == "multistep"
            else f"{self.schedule}, rising for {self.warmup:g} epochs" if self.warmup else self.schedule
        )  # fmt: skip
        more = (
            (" (of neither norms nor biases)" if self.decay == "weights" else "")
            + (", Nesterov's momentum" if self.nesterov else "")
            + (f", labels smoothed by {self.smoothing:g}" if self.smoothing else "")
        )
        smaller = (
            "" if self == Config.paper() else " The paper: ResNet-101, 220 epochs of batch 128, 10 seeds, float32."
        )
        return (
            f"{self.model} on {' and '.join(self.data)}, {self.epochs} epochs, batch {self.batch}, SGD 0.9, rate {self.rate:g} "
            f"({schedule}), weight decay {self.weight_decay:g}{more}, γ = {self.gamma:g}, {FORMS[self.residual]}, "
            f"memory={self.memory}, AMP {self.amp}, {self.repeats} seeds.{smaller}"
        )

    def recipe(self, **changes: Any) -> Recipe:
        names = (
            "epochs",
            "batch",
            "rate",
            "schedule",
            "milestones",
            "weight_decay",
            "decay",
            "nesterov",
            "smoothing",
            "warmup",
            "amp",
            "channels_last",
            "graph",
        )
        return Recipe(**{**{name: getattr(self, name) for name in names}, **changes})


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


def finals(records: list[Record], data: str, net: str) -> list[float]:
    return [r["final"] for r in records if r["data"] == data and r["net"] == net]


def figure(config: Config, records: list[Record]) -> Any:
    from matplotlib.ticker import LogLocator

    picture, axes = canvas(9.6, 3.2 * len(config.data), len(config.data), 2, squeeze=False)
    for row, data in zip(axes, config.data, strict=True):
        for net, name in NETS.items():
            runs = [r for r in records if r["data"] == data and r["net"] == net]
            if runs:
                errors = [[100 - a for a in r["accuracy"]] for r in runs]
                _band(row[0], errors, net, name)
                final = spread([r["final"] for r in runs], ".2f", " %")
                _band(row[1], [r["test_loss"] for r in runs], net, f"{name}:\n{final}")
        row[0].set(
            xlabel="epoch", ylabel="test error, %", yscale="log", title=f"{TITLES.get(data, data)}, {config.model}"
        )
        row[1].set(xlabel="epoch", ylabel="test loss", yscale="log")
        for axis in row:
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
        if row[1].lines:  # beside both, for the curves fill them
            row[1].legend(
                fontsize=8, title="final accuracy", title_fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
            )
    return picture


def _band(axis: Any, runs: list[list[float | None]], net: str, label: str) -> None:
    """The mean over the seeds, and from the least to the most."""
    known = [[nan if value is None else value for value in run] for run in runs]  # null: it was not finite
    columns, colour, line = list(zip(*known, strict=True)), TINTS[net], LINES.get(net, "-")
    epochs = range(1, len(columns) + 1)
    axis.plot(epochs, [mean(c) for c in columns], line, color=colour, label=label)
    axis.fill_between(
        epochs, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0
    )


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for data in config.data:
        title, plain = TITLES.get(data, data), finals(records, data, "resnet")
        bar = "≥ 93 %" if data == "cifar10" else ""
        for net, name in NETS.items():
            ours = finals(records, data, net)
            if ours:
                found.append(
                    Finding(f"{title}, {name}", spread(ours, ".2f", " %"), bar, mean(ours) >= 93 if bar else None)
                )
        for net, name in list(NETS.items())[1:]:
            ours = finals(records, data, net)
            if ours and plain:
                gap, room = mean(ours) - mean(plain), sum(stdev(v) if len(v) > 1 else 0.0 for v in (ours, plain))
                enough = min(len(ours), len(plain)) >= 3
                found.append(
                    Finding(
                        f"{title}, {name}, less the ResNet's", f"{gap:+.2f} %",
                        f"within ±{room:.2f} %, the seeds' spread" if enough else "within the seeds' spread",
                        abs(gap) <= room if enough else None,
                    )
                )  # fmt: skip
    return found
