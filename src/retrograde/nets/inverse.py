"""The way back from the end of a forward pass to its input, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..arithmetic.fixed import FixedPoint
from ..reverse.containers import copied_buffers
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


def run_back(net: nn.Module, blocks: Sequence[Any], held: Any, extra: Extra) -> None:
    """Undo every step of a state, running the blocks from the last to the first."""
    with copied_buffers(net.modules()):
        for k, block in reversed(list(enumerate(blocks))):
            x = held.pull(k)
            held.retreat(k, check_output(block(x, *extra.args, **extra.kwargs), x, f"block {k}"))


def inverted(net: MomentumNet, state: State, extra: Extra) -> Tensor:
    """x₀ from the final state of a momentum network."""
    if not isinstance(state, State) or state.held.recurrence != net.recurrence:
        source = str(state.held.recurrence) if isinstance(state, State) else type(state).__name__
        raise ValueError(
            f"this is not a state of this network: {source}, against {net.recurrence} here. Invert what `encode` of the same "
            "network returned."
        )
    held = state.held.copy()
    with torch.set_grad_enabled(state.grad_mode):
        run_back(net, net._steps(), held, extra)
        x0 = held.pull(-1)
        again = Pass(Momentum(x0, net.recurrence, first_range(held, x0), reversible=False), x0, len(net.blocks))
        with copied_buffers(net.modules()):
            net._launch(again, extra)
    emptied = held.buffers.get(EMPTIED)
    if (held.v != again.state.v).any() or (emptied is not None and emptied.any()):
        raise ValueError(
            "this state did not rewind to a start of this network. It was encoded with other parameters or other extra "
            "inputs, or a block does not repeat itself (dropout in training mode, say: call .eval() first)."
        )
    return x0
