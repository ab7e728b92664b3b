"""The way back from the end of a forward pass to its input, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from ..reverse.changes import all_at_once, exchanged_buffers
from ..reverse.extra import Extra
from ..reverse.inputs import check_output


@dataclass(frozen=True, eq=False, kw_only=True)
class Ending:
    """The end of a forward pass: `x` as floats, and the integers from which the start can be recovered."""

    x: Tensor
    fixed: FixedPoint
    held: Any = field(repr=False)  # a `reverse.scheme.State`
    start: Tensor = field(repr=False)  # the hash of the integers at the start
    grad_mode: bool = field(repr=False)  # blocks may take other kernels without it


@dataclass(frozen=True, eq=False, kw_only=True)
class State(Ending):
    """The end of a momentum network's pass: `x` and `v` as floats, and the integers."""

    v: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class CoupledState(Ending):
    """The end of a coupling's pass: both streams in `x`, and the integers."""


def rewound(net: Any, state: Ending, blocks: Sequence[Any], extra: Extra) -> Any:
    """The integers at layer 0: every step is undone, the blocks run from the last to the first."""
    if not isinstance(state, Ending) or state.held.recurrence != net.recurrence:
        given = str(state.held.recurrence) if isinstance(state, Ending) else type(state).__name__
        raise ValueError(
            f"this is not a state of this network: {given}, against {net.recurrence} here. Invert what `encode` of the same "
            "network returned."
        )
    held = state.held.copy()
    exchange, put_back = exchanged_buffers(net.modules())
    before = chain(map(torch._C._set_grad_enabled, [state.grad_mode]), exchange)
    after = chain(map(torch._C._set_grad_enabled, [torch.is_grad_enabled()]), put_back)
    try:  # a signal leaves the modules as they were (NOTE 4 of `reverse.replay`)
        all_at_once(before)
        for k, block in reversed(list(enumerate(blocks))):
            x = held.pull(k)
            held.retreat(k, check_output(block(x, *extra.args, **extra.kwargs), x, f"block {k}"))
    finally:
        all_at_once(after)
    if bool(held.hash() != state.start):
        raise ValueError(
            "this state did not rewind to its start. It was encoded with other parameters or other extra inputs, or a block "
            "does not repeat itself (dropout in training mode, say: call .eval() first)."
        )
    return held
