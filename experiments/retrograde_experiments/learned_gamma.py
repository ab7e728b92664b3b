"""Sec. 5.2: learning γ does not affect the accuracy: Momentum ResNets with γ fixed at 0.9 and with γ learned, from 0.9 on.

    v ← γ·v + (1 − γ)·f(x)        x ← x + v        in floats: a γ that is learned breaks the exact multiplication

γ = 1/(1 + e^{−a}), a learned with the other parameters, one for each stage (a does not decay). For a seed both start from the same
weights and see the same batches. The default preset is a thin network on
the digits of scikit-learn; the paper's is its CIFAR-10 setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .data.batches import Resident
from .findings import Finding, compared, spread
from .metrics import Key, Record
from .run import Context, one_thread
from .style import BLUE, ORANGE, canvas
from .train import build
from .train.unit import Training, small_set, trained

WAYS = {"fixed": ("γ fixed", BLUE), "learned": ("γ learned", ORANGE)}
MARGIN = 1.0  # %: accuracies that differ by less are called equal


@dataclass(frozen=True)
class Config(Training):
    decisive: ClassVar[tuple[str, ...]] = ("data", "model", "residual", "epochs", "batch", "rate", "schedule", "limit")

    data: str = "cifar10"
    model: str = "resnet101"
    gamma: float = 0.9
    repeats: int = 10

    @classmethod
    def default(cls) -> Config:
        return cls(
            data="digits", model="thin-resnet20", epochs=12, batch=64, rate=0.1, schedule="onecycle", channels_last=False,
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", model="thin-resnet14", epochs=1, batch=64, rate=0.1, schedule="onecycle", limit=128, channels_last=False,
            repeats=3,
        )  # fmt: skip

    def setting(self) -> str:
        return (
            f"{self.model} on {self.data}, γ = {self.gamma:g} or learned from it on, one for each stage, in floats, "
            f"{self.trained_as()}. The paper: ResNet-101 on CIFAR-10, 220 epochs of batch 128."
        )


class FloatStage(nn.Module):
    """A stage of a network with residual="branch" as a momentum network in floats, with a γ that may be learned."""

    def __init__(self, stage: nn.Sequential, gamma: float, learned: bool) -> None:
        super().__init__()
        self.first, self.rest = stage[0], nn.ModuleList(list(stage)[1:])
        a = torch.tensor(math.log(gamma / (1 - gamma)))
        self.a: Tensor
        if learned:
            self.a = nn.Parameter(a)
        else:
            self.register_buffer("a", a)

    def forward(self, x: Tensor) -> Tensor:
        x, gamma = self.first(x), torch.sigmoid(self.a)
        v = torch.zeros_like(x)
        for block in self.rest:
            v = gamma * v + (1 - gamma) * block.branch(x)  # type: ignore[operator]
            x = x + v
        return x


def network(config: Config, learned: bool, source: Resident) -> nn.Module:
    net: Any = build(
        config.model, classes=source.classes, channels=source.channels, gamma=0, memory="store", residual="branch"
    )
    for name, stage in [(n, m) for n, m in net.named_children() if n.startswith("layer")]:
        setattr(net, name, FloatStage(stage, config.gamma, learned))
    net.forward = lambda x: net.fc(net.avgpool(_stages(net, net.maxpool(net.relu(net.bn1(net.conv1(x)))))).flatten(1))
    return net


def _stages(net: Any, x: Tensor) -> Tensor:
    for name, stage in net.named_children():
        x = stage(x) if name.startswith("layer") else x
    return x


def gammas(net: nn.Module) -> list[float]:
    return [round(float(torch.sigmoid(m.a.detach())), 5) for m in net.modules() if isinstance(m, FloatStage)]


def units(config: Config) -> list[Key]:
    return [{"way": way, "seed": seed} for seed in range(config.repeats) for way in WAYS]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with one_thread():
        source = Resident(
            small_set(config.data), config.batch, seed=unit["seed"], device=context.device, limit=config.limit
        )
        torch.manual_seed(unit["seed"])
        net = network(config, unit["way"] == "learned", source)
        _, curve = trained(net, config.recipe(decay="weights"), source, context, lambda net: {"gamma": gammas(net)})
        return {"accuracy": curve["accuracy"], "gamma": curve["gamma"], "final": curve["accuracy"][-1]}


def figure(config: Config, records: list[Record]) -> Any:
    """Left: accuracy over the epochs; right: where γ goes, stage by stage."""
    picture, (left, right) = canvas(9, 3.8, 1, 2)
    for way, (name, colour) in WAYS.items():
        runs = [r["accuracy"] for r in records if r["way"] == way]
        if runs:
            columns = list(zip(*runs, strict=True))
            epochs = range(1, len(columns) + 1)
            left.plot(epochs, [mean(c) for c in columns], "-" if way == "fixed" else "--", color=colour, label=name)
            left.fill_between(
                epochs, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, linewidth=0
            )
    for record in (r for r in records if r["way"] == "learned"):
        for stage, path in enumerate(zip(*record["gamma"], strict=True)):
            right.plot(range(1, len(path) + 1), path, "-", color=("#0072b2", "#d55e00", "#009e73", "#cc79a7")[stage], lw=1,
                       label=f"stage {stage + 1}" if record["seed"] == 0 else None)  # fmt: skip
    right.axhline(config.gamma, color="#9ca3af", lw=1, ls=":")
    left.set(
        xlabel="epoch", ylabel="test accuracy, %", title=f"{config.model}, {config.data}: mean and range of the seeds"
    )
    right.set(xlabel="epoch", ylabel="γ", title="learned γ, every seed")
    for axis in (left, right):
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    by = {way: {r["seed"]: r["final"] for r in records if r["way"] == way} for way in WAYS}
    found = [Finding(f"accuracy, {WAYS[way][0]}", spread(list(v.values()), ".2f", " %")) for way, v in by.items() if v]
    both = sorted(by["fixed"].keys() & by["learned"].keys())
    if both:
        pair = ([by[way][s] for s in both] for way in ("learned", "fixed"))
        found.append(compared("accuracy, γ learned less fixed", *pair, least=-MARGIN, most=MARGIN))
        ends = [record["gamma"][-1] for record in records if record["way"] == "learned"]
        stages = [f"{mean(values):.3f}" for values in zip(*ends, strict=True)]
        found.append(Finding("γ at the end, stage by stage", ", ".join(stages)))
    return found
