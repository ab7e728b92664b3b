"""Everything this distribution uses of `retrograde` that is not a public name, in one place.

    units and timing   human, interleave, Times, peak_memory: `rg.measure` gives one model's report, not these parts
    ranges             a checkpoint must keep the fixed-point range of a network, which is no part of its state_dict
    momentum_options   how the options of `rg.MomentumNet` and `rg.convert` are spelled

`retrograde.extras.require` is used as well: it stands at the root of the package and is no part of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde import FixedPoint
from retrograde.convert.block import place_of
from retrograde.convert.convert import stages_of
from retrograde.memory import Peak, Times, human, interleave, peak_memory
from retrograde.reverse.range import Range, holders

__all__ = [
    "Kept", "Peak", "Times", "captured_by", "collect", "converted_blocks", "evaluation_ranges", "every_range", "human",
    "interleave", "momentum_options", "peak_memory", "put_back", "set_gamma", "stacks", "training_ranges", "written",
]  # fmt: skip

Kept = dict[str, list[list[Any]]]
"""Ranges as numbers and strings, by the name of the network that has them."""


def stacks(net: nn.Module) -> list[Any]:
    """The reversible stacks in a network: each has `blocks`."""
    return [part for _, part in holders(net)]


def _holders(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """Stacks, and the stages of a converted model, which are no modules of it; by name."""
    yield from holders(net)
    yield from ((f"stage {k}", stage) for k, stage in enumerate(stages_of(net)))


def training_ranges(net: nn.Module) -> Iterator[tuple[str, Range]]:
    """The range of each stack and converted stage."""
    for name, part in _holders(net):
        yield name, part.range


every_range = training_ranges
"""A range knows its fixed points of training and of evaluation."""


def written(ranges: Iterable[tuple[str, Range]]) -> Kept:
    """Ranges as numbers and strings."""
    return {
        name: [
            [str(dtype).removeprefix("torch."), fixed.bits, fixed.guard, training]
            for (dtype, training), fixed in held.found.items()
        ]
        for name, held in ranges
    }


def put_back(ranges: Iterable[tuple[str, Range]], kept: Mapping[str, list[list[Any]]]) -> None:
    """The inverse of `written`. A range of which nothing was kept is found anew."""
    for name, held in ranges:
        held.found = {}
        for dtype, bits, guard, *training in kept.get(name, []):
            integers = getattr(torch, dtype)
            held.found[integers, training != [False]] = FixedPoint(bits, integers, guard)


@contextmanager
def evaluation_ranges(net: nn.Module) -> Iterator[None]:
    """Ranges of their own for an evaluation, which depend on no evaluation before it and on no training.

    BatchNorm's statistics lag behind early in training, and with them activations are others.
    """
    rg.settle(net)
    kept = written(training_ranges(net))
    put_back(training_ranges(net), {})
    try:
        yield
        rg.settle(net)  # while these ranges are in place
    finally:
        put_back(training_ranges(net), kept)


def collect(net: nn.Module, x: Tensor) -> None:
    """Ask every stack what it has met on the device of `x`, without waiting for it."""
    for _, held in training_ranges(net):
        held.deferred.collect(x)


def captured_by(net: nn.Module) -> list[Any]:
    """What a CUDA graph of this network's step was captured with: it must be captured anew when any of it changes."""
    return [net.training, *((getattr(part, "recurrence", None), dict(part.range.found)) for _, part in _holders(net))]


def set_gamma(net: nn.Module, gamma: float) -> None:
    """Give all momentum stages another γ, from the next pass on. Their range is found anew."""
    for part in stacks(net):
        if isinstance(part, rg.MomentumNet):
            part.gamma = gamma
            part.range.found.clear()


def converted_blocks(net: nn.Module) -> list[nn.Module]:
    """The blocks of a converted network that run in the steps of a stage."""
    places = ((module, place_of(module)) for module in net.modules())
    return [module for module, place in places if place is not None and not place.stage.checkpointed]


def momentum_options(memory: str | int, fixed_point: str | tuple[int, torch.dtype], verify: str) -> dict[str, Any]:
    """Options of `rg.MomentumNet` and `rg.convert` from values that can be written to a file.

    Args:
        memory: a mode, or a budget in bytes.
        fixed_point: "auto", "int16", or the fraction bits and the dtype of the integers.
        verify: "auto", "strict" or "off".

    >>> momentum_options(8000, "int16", "strict")
    {'memory': 8000, 'fixed_point': 'int16', 'verify': 'strict'}
    """
    fixed = FixedPoint(*fixed_point) if isinstance(fixed_point, tuple) else fixed_point
    options = {"memory": memory, "fixed_point": fixed, "verify": verify}
    return {name: value for name, value in options.items() if name == "memory" or value != "auto"}
