"""Sec. 3.2: the layer conv4_x of a ResNet-152: its parameters, and the activations that training stores.

The paper: 36 blocks, 40 M parameters, activations of fifty times as many numbers. It gives no batch, on which the latter depends.
Counted on tensors without values: every tensor that autograd saves in a forward pass of the stage, once, without the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from retrograde.nets.resnet import resnet

from .config import Settings
from .findings import Finding
from .metrics import Key, Record
from .run import Context
from .style import BLUE, PAPER, canvas

PARAMETERS, TIMES = 40e6, 50  # the paper's
LARGEST = 256  # the paper's batch for ImageNet


@dataclass(frozen=True)
class Config(Settings):
    batches: tuple[int, ...] = (1, 16, 32, 64, 128, 256)

    def setting(self) -> str:
        return (
            f"Stage conv4_x of ResNet-152 at 224×224, batches {', '.join(map(str, self.batches))}; counted, not timed."
        )

    @classmethod
    def smoke(cls) -> Config:
        return cls(batches=(1, 64))


def units(config: Config) -> list[Key]:
    return [{"batch": batch} for batch in config.batches]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    with torch.device("meta"):
        stage = resnet(152).stages()[2]
        x = torch.empty(unit["batch"], 512, 28, 28, requires_grad=True)
    own, kept = {id(p) for p in stage.parameters()}, dict[int, torch.Tensor]()

    def pack(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in own and t.dim() == 4:
            kept[id(t)] = t  # held, so that no other tensor takes its id
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        stage(x)
    return {
        "blocks": len(stage), "parameters": sum(p.numel() for p in stage.parameters()),
        "activations": sum(t.numel() for t in kept.values()),
    }  # fmt: skip


def figure(config: Config, records: list[Record]) -> Any:
    picture, axis = canvas(5.6, 3.4)
    axis.plot([r["batch"] for r in records], [r["activations"] / r["parameters"] for r in records], "o-", color=BLUE)
    axis.axhline(TIMES, **PAPER)
    axis.annotate("the paper: 50", (records[0]["batch"], TIMES), (0, 4), textcoords="offset points", fontsize=9)
    axis.set(
        xlabel="batch",
        ylabel="stored activations : parameters",
        title="conv4_x of ResNet-152",
        xscale="log",
        yscale="log",
    )
    axis.set_xticks(config.batches, [str(b) for b in config.batches])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:g}")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    if not records:
        return []
    count = records[0]["parameters"]
    found = [
        Finding("parameters", f"{count / 1e6:.1f} M", "40 M, to 5 %", abs(count / PARAMETERS - 1) <= 0.05),
        Finding("blocks", str(records[0]["blocks"]), "36", records[0]["blocks"] == 36),
    ]
    each = records[0]["activations"] / records[0]["batch"] / count
    reached = TIMES / each
    found.append(Finding("activations : parameters, per image", f"{each:.2f}"))
    found.append(
        Finding(
            "batch at which activations are 50 times the parameters",
            f"{reached:.0f}",
            f"≤ {LARGEST}",
            reached <= LARGEST,
        )
    )
    return found
