"""Fig. 7, top: memory of a training step over the batch size, and the largest batch that fits, at depth 152 and 1202.

    resnet       the plain network          checkpoint   with torch.utils.checkpoint on every block
    momentum     γ = 0.9, in reverse; blocks that change the shape are checkpointed

Memory is all that training needs at once: parameters, gradients, SGD's momentum, the batch, and the peak of forward and
backward. The batch is doubled while it fits, then the largest that fits is found to within 3 %. The paper's depth 1201 is 1202
in the usual count.

The pass in which a momentum network finds its fixed-point range, its first, runs on 64-bit integers and takes more: it is in the
smallest batch's figure alone. A network that trains at its largest batch must find its range on a smaller one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import retrograde as rg

from .config import Settings
from .findings import Finding
from .metrics import Key, Record
from .private import human
from .run import Context
from .style import COLOURS, MARKERS, NAMES, PAPER, canvas
from .train import build

WAYS = ("resnet", "checkpoint", "momentum")
SHAPES = {"imagenet": ("imagenet", 224, 1000), "cifar": ("cifar", 32, 10)}


@dataclass(frozen=True)
class Config(Settings):
    decisive: ClassVar[tuple[str, ...]] = ("nets", "gamma", "budget_gb", "cap")

    nets: tuple[str, ...] = ("resnet152 imagenet", "thin-resnet1202 cifar")
    gamma: float = 0.9
    start: int = 8
    cap: int = 65536  # batches are not tried beyond
    budget_gb: float | None = 16.0  # the memory of the paper's GPUs; None: what the device has
    channels_last: bool = True

    @classmethod
    def smoke(cls) -> Config:
        return cls(nets=("thin-resnet8 cifar",), start=2, cap=4, budget_gb=0.003, channels_last=False)

    def setting(self) -> str:
        room = "the device's memory" if self.budget_gb is None else f"{self.budget_gb:g} GB"
        return (
            f"{' and '.join(self.nets)}, γ = {self.gamma:g}, float32, batch from {self.start} until {room} is full (at most "
            f"{self.cap:,}); one training step on noise: memory does not depend on the images. The paper: one epoch, on 16 GB GPUs."
        )


def units(config: Config) -> list[Key]:
    return [{"net": net, "way": way} for net in config.nets for way in WAYS]


class Checkpointed(nn.Module):
    """A block whose input is kept and whose activations are computed again, with BatchNorm's statistics moved once."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), self._still()))

    @contextmanager
    def _still(self) -> Iterator[None]:
        norms = [(m, m.momentum) for m in self.block.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm, _ in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, momentum in norms:
                norm.momentum = momentum


def checkpoint_blocks(net: nn.Module, every: bool) -> None:
    """Checkpoint every block of every stage, or those that change the shape."""
    stage: Any
    for stage in [child for name, child in net.named_children() if name.startswith("layer")]:
        for index, block in enumerate(stage.children()):
            if every or getattr(block, "downsample", None) is not None:
                stage[index] = Checkpointed(block)


def network(name: str, way: str, gamma: float) -> nn.Module:
    """The network of a way. What is not reversed in the momentum network (the blocks that change the shape) is checkpointed."""
    model, shape = name.split()
    size, _, classes = SHAPES[shape]
    plain = way != "momentum"
    net = build(
        model, classes=classes, size=size, gamma=0.0 if plain else gamma, memory="store" if plain else "reverse"
    )
    if way != "resnet":
        checkpoint_blocks(net, every=way == "checkpoint")
    return net


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    net = network(unit["net"], unit["way"], config.gamma).to(context.device)
    if config.channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    _, side, classes = SHAPES[unit["net"].split()[1]]
    known: dict[int, int | None] = {}

    def needed(batch: int) -> int | None:
        if batch not in known:
            known[batch] = step_memory(net, batch, side, classes, config, context.device)
            context.progress.step(f"batch {batch}: {human(known[batch] or 0) if known[batch] else 'does not fit'}")
        return known[batch]

    largest = largest_fitting(needed, config.start, config.cap, _room(config, context.device))
    fitting = {batch: peak for batch, peak in sorted(known.items()) if peak is not None}
    return {
        "batches": list(fitting),
        "peaks": list(fitting.values()),
        "largest": largest,
        "capped": largest >= config.cap,
    }


def largest_fitting(needed: Callable[[int], int | None], start: int, cap: int, room: float | None = None) -> int:
    """The largest batch up to `cap` for which `needed` is not None, to within 3 %; 0 if not even `start` fits.

    Args:
        needed: bytes that a batch takes; None if it does not fit.
        room: bytes there are, where known. Memory is nearly a straight line over the batch, so that most batches need not be tried;
            the largest one and, 3 % above it, one that does not fit are always tried.
    """
    low, batch = 0, start
    fits: dict[int, int] = {}

    def reach() -> float | None:
        """The batch at which the line through the last two meets the room."""
        if room is None or len(fits) < 2:
            return None
        (a, ya), (b, yb) = sorted(fits.items())[-2:]
        return b + (room - yb) * (b - a) / (yb - ya) if yb > ya else None

    def tried(batch: int) -> bool:
        peak = needed(batch)
        if peak is not None:
            fits[batch] = peak
        return peak is not None

    while batch <= cap and ((end := reach()) is None or batch < 1.15 * end) and tried(batch):
        low, batch = batch, 2 * batch
    high = min(batch, cap + 1)
    while low and high - low > max(1, low // 32):
        end, middle = reach(), (low + high) // 2
        if end is not None and 0.98 * end < high:
            middle = max(int(0.98 * end), low + max(1, low // 32))
        middle = min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if tried(middle) else (low, middle)
    return low


def _room(config: Config, device: torch.device) -> float | None:
    """Bytes there are, where that is known."""
    if config.budget_gb is not None:
        return config.budget_gb * 1e9
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device))


def step_memory(
    net: nn.Module, batch: int, side: int, classes: int, config: Config, device: torch.device
) -> int | None:
    """Bytes that training needs at once with this batch; None if they are not there."""
    try:
        needed: int | None = _needed(net, batch, side, classes, config.channels_last, device)
    except torch.OutOfMemoryError:
        needed = None
    for parameter in net.parameters():
        parameter.grad = None
    gc.collect()  # after the handler: until then the error keeps the frames it came through, and their tensors
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None if needed is None or (config.budget_gb is not None and needed > config.budget_gb * 1e9) else needed


def _needed(net: nn.Module, batch: int, side: int, classes: int, channels_last: bool, device: torch.device) -> int:
    static = sum(3 * p.numel() * p.element_size() for p in net.parameters())  # with gradients and SGD's momentum
    static += sum(b.numel() * b.element_size() for b in net.buffers())
    x = torch.randn(batch, 3, side, side, device=device)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    y = torch.randint(classes, (batch,), device=device)
    peak = rg.measure(net, x, loss=lambda output: cross_entropy(output, y), repeats=1, warmup=0).peak
    return static + x.numel() * x.element_size() + peak


def figure(config: Config, records: list[Record]) -> Any:
    picture, axes = canvas(4.6 * len(config.nets), 3.8, 1, len(config.nets), squeeze=False)
    for axis, net in zip(axes[0], config.nets, strict=True):
        for record in (r for r in records if r["net"] == net):
            way, more = record["way"], "≥ " if record["capped"] else ""
            label = f"{NAMES[way]}: {more}{record['largest']:,}"
            axis.plot(
                record["batches"],
                [p / 1e9 for p in record["peaks"]],
                MARKERS[way] + "-",
                color=COLOURS[way],
                label=label,
                markersize=4,
            )
        axis.set(xlabel="batch", ylabel="memory of a training step, GB", xscale="log", yscale="log", title=net)
        if config.budget_gb is not None:
            axis.axhline(config.budget_gb, **PAPER)
            axis.annotate(f"{config.budget_gb:g} GB", (0.98, config.budget_gb), (0, 3), xycoords=("axes fraction", "data"),
                          textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
        axis.set_ylim(top=6 * axis.get_ylim()[1])  # room for the legend
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.legend(fontsize=8, title="largest batch that fits", title_fontsize=8, loc="upper left")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for net in config.nets:
        largest = {r["way"]: r for r in records if r["net"] == net}
        for way, record in largest.items():
            more = "≥ " if record["capped"] else ""
            found.append(Finding(f"largest batch, {net}, {NAMES[way]}", f"{more}{record['largest']:,}"))
        if {"resnet", "momentum"} <= largest.keys() and largest["resnet"]["largest"]:
            ratio = largest["momentum"]["largest"] / largest["resnet"]["largest"]
            more = "≥ " if largest["momentum"]["capped"] else ""
            found.append(
                Finding(f"largest batch, {net}, Momentum over ResNet", f"{more}{ratio:.1f}×", "> 1×", ratio > 1)
            )
    return found
