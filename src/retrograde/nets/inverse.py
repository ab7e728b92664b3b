"""The way back from the end of a forward pass to its input, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..arithmetic.fixed import FixedPoint
from ..reverse.containers import all_at_once, exchanged_buffers
from ..reverse.extra import Extra
from ..reverse.forward import Pass
from ..reverse.inputs import check_output
from ..reverse.momentum import EMPTIED, Momentum
from ..reverse.widening import first_range

if TYPE_CHECKING:
    from .momentum import MomentumNet


@dataclass(frozen=True, eq=False)
class State:
    """The end of a forward pass: `x` and `v` as floats, and the integers from which the start can be recovered."""

    x: Tensor
    v: Tensor
    fixed: FixedPoint
    held: Momentum = field(repr=False)
    grad_mode: bool = field(repr=False)  # blocks may take other kernels without it


def run_back(net: nn.Module, blocks: Sequence[Any], held: Any, extra: Extra, grad_mode: bool) -> None:
    """Undo every step of a state, running the blocks from the last to the first."""

    def run() -> None:
        for k, block in reversed(list(enumerate(blocks))):
            x = held.pull(k)
            held.retreat(k, check_output(block(x, *extra.args, **extra.kwargs), x, f"block {k}"))

    on_copied_buffers(net, run, grad_mode)


def on_copied_buffers(net: nn.Module, run: Callable[[], None], grad_mode: bool) -> None:
    """Let the modules of the network work on copies of their buffers. A signal leaves them as they were (NOTE 4 of `replay`)."""
    exchange, put_back = exchanged_buffers(net.modules())
    before = chain(map(torch._C._set_grad_enabled, [grad_mode]), exchange)
    after = chain(map(torch._C._set_grad_enabled, [torch.is_grad_enabled()]), put_back)
    try:
        all_at_once(before)
        run()
    finally:
        all_at_once(after)


def inverted(net: MomentumNet, state: State, extra: Extra) -> Tensor:
    """x₀ from the final state of a momentum network."""
    if not isinstance(state, State) or state.held.recurrence != net.recurrence:
        source = str(state.held.recurrence) if isinstance(state, State) else type(state).__name__
        raise ValueError(
            f"this is not a state of this network: {source}, against {net.recurrence} here. Invert what `encode` of the same "
            "network returned."
        )
    held = state.held.copy()
    run_back(net, net._steps(), held, extra, state.grad_mode)
    x0 = held.pull(-1)
    again = Pass(Momentum(x0, net.recurrence, first_range(held, x0), reversible=False), x0, len(net.blocks))
    on_copied_buffers(net, lambda: net._launch(again, extra), state.grad_mode)
    emptied = held.buffers.get(EMPTIED)
    if (held.v != again.state.v).any() or (emptied is not None and emptied.any()):
        raise ValueError(
            "this state did not rewind to a start of this network. It was encoded with other parameters or other extra "
            "inputs, or a block does not repeat itself (dropout in training mode, say: call .eval() first)."
        )
    return x0
