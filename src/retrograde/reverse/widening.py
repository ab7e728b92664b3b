"""A range that becomes wider within a pass: the integers are shifted to the right, and back again on the way back.

    q = high·2^by + rest

The rest, what is shifted out, is kept beside the state until backward, so nothing is lost.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from .calibrate import calibrated

if TYPE_CHECKING:
    from .scheme import State


class Widening:
    """Before a step, make room for |x| and |v| up to these.

    Attributes:
        before, after: the fixed point until then, and the one from then on.
        rests: what was shifted out of each tensor.
    """

    def __init__(self, state: State, x: float, v: float) -> None:
        self.before = state.fixed
        self.after = widened(state.fixed, x, v)
        self.rests: dict[str, Tensor] = {}
        for name in state.names:
            high, self.rests[name] = shifted(getattr(state, name), self.bits(state, name))
            setattr(state, name, high)
        state.fixed = self.after
        state.range.hold(self.after)

    def undo(self, state: State) -> None:
        """Back to the range before, once the step is undone."""
        for name in state.names:
            setattr(state, name, self.narrowed(state, name))
        state.fixed = self.before
        state.range.hold(self.before)

    def narrowed(self, state: State, name: str) -> Tensor:
        """A tensor of the state as it was before."""
        return unshifted(getattr(state, name), self.rests[name], self.bits(state, name))

    def bits(self, state: State, name: str) -> int:
        """By how many bits a tensor was shifted."""
        fewer = self.before.bits - self.after.bits
        return fewer + self.before.guard - self.after.guard if name in state.guarded else fewer


def widened(now: FixedPoint, x: float, v: float) -> FixedPoint:
    """A fixed point that holds |x| and |v| up to these, no finer than the one in use."""
    ideal = calibrated(x, v, now.dtype, now.guard)
    bits = min(now.bits, ideal.bits)
    guard = min(now.bits + now.guard, ideal.bits + ideal.guard) - bits
    return FixedPoint(bits, now.dtype, max(guard, 0))


def take_wider(state: State, k: int, y: Tensor) -> Tensor:
    """Step k left the range: undo it, widen the range, and take it again."""
    f = float(y.detach().abs().amax())
    if state.range.given or not math.isfinite(f):
        state.range.refuse(k + 1)
        return state.read()
    state.draw(k)
    state.undo(k, y, False)
    widen(state, k, *state.reach(k, f))
    state.range.rows[k + 1].zero_()
    out = state.take(k, y)
    if not state.range.fits(k + 1):  # x does not fit its float
        state.range.refuse(k + 1)
    return out


def widen(state: State, k: int, x: float, v: float) -> None:
    """Before step k, make room for |x| and |v| up to these."""
    widening = Widening(state, x, v)
    if state.reversible:
        state.widenings[k] = widening


def pull_before(state: State, k: int) -> Tensor:
    """`State.pull` of an input that was read in the range before a widening, or before step 0."""
    if k >= 0:
        state.draw(k)
    if k not in state.widenings:
        return state.decoded("x")
    widening, name = state.widenings[k], state.input_name(k)
    q = widening.narrowed(state, name)
    out = torch.empty_like(q, dtype=state.dtype)
    state.kernels.decode(q, widening.before.unit, out)
    return out


def shifted(q: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """q·2^−by, rounded, and the rest, which takes as few bytes as it can. The memory of q is used.

    >>> high, rest = shifted(torch.tensor([7, -9], dtype=torch.int32), 2)
    >>> high, rest
    (tensor([ 2, -2], dtype=torch.int32), tensor([-1, -1], dtype=torch.int8))
    """
    if by >= 8 * q.element_size() - 2:
        return torch.zeros_like(q), q
    high = (q + ((1 << by) >> 1)).bitwise_right_shift_(by)  # the only array beside q: a step has room for one
    narrow = next(
        dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) if by <= 8 * dtype.itemsize - 1
    )
    return high, q.sub_(high, alpha=1 << by).to(narrow)


def unshifted(high: Tensor, rest: Tensor, by: int) -> Tensor:
    """The inverse of `shifted`."""
    if by >= 8 * high.element_size() - 2:
        return rest.clone()
    return (high << by) + rest.to(high.dtype)
