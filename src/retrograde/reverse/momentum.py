"""The momentum scheme [sander2021, eq. 2 and 3], in integers.

    forward   v ← γ·v + gain·f(x)     x ← x + ⌊v⌉
    inverse   x ← x − ⌊v⌉             v ← (v − gain·f(x)) / γ

x and v are fixed-point integers (⌊v⌉ is v without its guard digits) and γ·v is an exactly reversible multiplication,
so the inverse recovers every state bit for bit, provided f repeats itself. gain is 1 − γ, or 1 at γ = 1. What a block
computes is its form (`recurrence`): f(x), or x + f(x), or the f of relu(x + f(x)). `gradients` has the step's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .forms import launch
from .gradients import MomentumGradient
from .recurrence import Recurrence
from .scheme import State, laid_out


class Momentum(State):
    """x, v and the information buffers of one forward pass; see `scheme`."""

    names = ("v", "x")
    guarded = ("v",)
    gradient_type = MomentumGradient
    launch = launch
    recurrence: Recurrence

    def start(self, x0: Tensor) -> None:
        (self.x,) = self.begin(x0)
        self.v = torch.zeros_like(self.x)
        # the dtype that plain autograd hands gradients on in; but what is carried is gain times that, which float16 may round to 0
        dtype = x0.dtype if x0.dtype == torch.bfloat16 else self.fixed.work
        self.blank = torch.zeros((), dtype=dtype, device=x0.device).expand(x0.shape)
        self.gradient = self.gradient_type(self.recurrence, dtype, self.kernels, self.x.stride())
        self.forms = self.gradient.forms  # by layer, what the kernels make of its block's output

    def rest(self) -> Tensor:
        """v as a float."""
        return self.fixed.decode(self.v, self.dtype, self.fixed.guard)

    def take(self, k: int, y: Tensor) -> Tensor:
        begin, dtype, over = self.recurrence.places[k]
        if begin == k and dtype is not None and k not in self.buffers:
            if not self.reversible:  # the one before is needed only where the step reaches into it
                last = self.recurrence.places[k - 1][0]
                self.buffers = {last: self.buffers[last]} if over else {}
            self.buffers[k] = torch.zeros_like(self.x, dtype=dtype)
        mask = None
        if self.forms[k] == 2:
            mask = torch.empty(-(-self.x.numel() // 8), dtype=torch.uint8, device=self.x.device)
            self.gradient.masks[k] = mask
        out = torch.empty_like(self.x, dtype=self.dtype)
        *step, before, over = self._step(k, y)
        self.gradient.output_dtypes[k] = step[3].dtype
        self.kernels.advance(*step, out, self.range.rows[k + 1], mask, before, over)
        return out

    def draw(self, k: int) -> Tensor:
        out = torch.empty_like(self.x, dtype=self.dtype)
        self.kernels.pull(self.x, self.v, self.fixed.unit, self.fixed.guard, out)
        return out

    def undo(self, k: int, y: Tensor, further: bool) -> Tensor | None:
        out = torch.empty_like(self.x, dtype=self.dtype) if further else None
        *step, before, over = self._step(k, y)
        self.kernels.retreat(*step, out, before, over)
        self.buffers.pop(k, None)
        return out

    def _step(self, k: int, y: Tensor) -> tuple[Any, ...]:
        """Arguments of the kernels: x to guard; then the buffer before that of step k with how many bits of its digit go there."""
        y = laid_out(y.detach(), self.x.stride(), self.fixed.work)
        n, d, _, factor = self.recurrence.factors[k]
        begin, _, over = self.recurrence.places[k]
        numbers = (n, d, factor / self.fixed.guarded_unit, self.fixed.unit, self.forms[k], self.fixed.guard)
        before = self.buffers[self.recurrence.places[k - 1][0]] if over else None
        return self.x, self.v, self.buffers.get(begin), y, self.dtype, *numbers, before, over

    def reach(self, k: int, f: float) -> tuple[float, float]:
        x = float(self.x.abs().amax()) * self.fixed.unit
        v = float(self.v.abs().amax()) * self.fixed.guarded_unit
        _, _, gamma, factor = self.recurrence.factors[k]
        v1 = gamma * v + factor * (f + (x if self.gradient.forms[k] else 0.0))
        return x + v1, v1
