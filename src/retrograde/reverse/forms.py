"""What the forms "block" and "relu" make of a block's output, in plain torch, and the initial velocity v₀ = f(x₀).

The kernels do this for the steps of `momentum`. Here it stands for the rest: v₀, where it is not 0, is set in a step before
the first one, with number −1; and `sign` has factors of its own for f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.reference import packed, unpacked
from .scheme import Gradients, traced
from .widening import widen, widened

if TYPE_CHECKING:
    from .gradients import MomentumGradient
    from .momentum import Momentum


def f_of(state: Momentum, k: int, y: Tensor, forwards: bool) -> Tensor:
    """f of block k, which gave y on the state's x. On the way forward it is noted where a relu passes its input."""
    f, form = y.detach().to(state.fixed.work), state.gradient.forms[k]
    if not form:
        return f
    x = state.decoded("x").to(f.dtype)
    if form == 2:
        f = (x + f).to(y.dtype)
        if forwards:
            state.gradient.masks[k] = packed(~(f <= 0), state.x)
        f = torch.relu(f).to(x.dtype)
    return f - x


def launch(state: Momentum, y: Tensor) -> Tensor:
    """Set v to f of y, which a block gave on x₀. Returns x₀."""
    v0 = f_of(state, -1, y, forwards=True)
    if state.range.looks and not state.range.given and v0.numel() and bool(v0.isfinite().all()):
        x, v = float(state.x.abs().amax()) * state.fixed.unit, float(v0.abs().amax())
        wider = widened(state.fixed, x, v)
        if wider != state.fixed:
            state.range.rows[0][1] *= 2.0 ** (wider.bits - state.fixed.bits)  # |x₀| in the new units
            widen(state, -1, x, v)
    state.encode(v0, state.v, column=0, guard=state.fixed.guard)
    return state.read()


def launched(gradient: MomentumGradient, gx: Tensor | None, gv: Tensor | None) -> tuple[Gradients, Tensor | None]:
    """Gradients of the tokens and of the output that made v₀, from those of x₀ and v₀."""
    if gv is None:
        return [gx, None], None
    gx, gy = through_form(gradient, -1, gx, gv)
    return [gx, None], gy


def through_form(gradient: MomentumGradient, k: int, gx: Tensor | None, gf: Tensor) -> tuple[Tensor | None, Tensor]:
    """Gradients of x and of block k's output y, from those of x and of f."""
    if gradient.forms[k] != 2:
        return (add(gx, -gf, gradient.dtype) if gradient.forms[k] else gx), gf
    passed = unpacked(gradient.mask(k), gf.shape, gradient.strides)
    return add(gx, -torch.where(passed, 0, gf), gradient.dtype), torch.where(passed, gf, 0)


def add(a: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """a + b in this dtype, into a's memory where it is an array and no graph is made of it; b is never written to."""
    if a is None or b is None:
        return a if b is None else b.to(dtype, copy=True)
    return a + b if traced(a, b) or 0 in a.stride() else a.add_(b)
