"""The initial velocity v₀ = f(x₀), where it is not 0: a step before the first one, with number −1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.reference import packed
from .widening import widen, widened

if TYPE_CHECKING:
    from .momentum import Momentum


def launch(state: Momentum, y: Tensor) -> Tensor:
    """Set v to f of y, which a block gave on x₀. Returns x₀."""
    gradient, form = state.gradient, state.gradient.forms[-1]
    x0 = state.read()
    v0 = y.detach()
    if form:
        seen = x0.to(state.fixed.work)
        if form == 2:
            v0 = torch.relu((seen + v0.to(seen.dtype)).to(v0.dtype))
            gradient.masks[-1] = packed(~(v0 <= 0), state.x)
        v0 = v0.to(seen.dtype) - seen
    if state.range.looks and not state.range.given and v0.numel() and bool(v0.isfinite().all()):
        x, v = float(state.x.abs().amax()) * state.unit, float(v0.abs().amax())
        wider = widened(state.fixed, x, v)
        if wider != state.fixed:
            state.range.rows[0][1] *= 2.0 ** (wider.bits - state.fixed.bits)  # |x₀| in the new units
            widen(state, -1, x, v)
            x0 = state.read()
    state.encode(v0, state.v, column=0, guard=state.fixed.guard)
    return x0
