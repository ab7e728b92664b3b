"""The momentum scheme [sander2021, eq. 2 and 3], in integers.

    forward   v ← γ·v + gain·f(x)     x ← x + ⌊v⌉
    inverse   x ← x − ⌊v⌉             v ← (v − gain·f(x)) / γ

x and v are fixed-point integers (⌊v⌉ is v without its guard digits) and γ·v is an exactly reversible multiplication,
so the inverse recovers every state bit for bit, provided f repeats itself. gain is 1 − γ, or 1 at γ = 1. What a block
computes is its form (`recurrence`): f(x), or x + f(x), or the f of relu(x + f(x)).

The step is linear in x and v, so its gradient needs no values. With s = gx + gv:

    gy = gain·s      gv ← γ·s      gx ← gx

but gx ← gx − gy for form "block", and for form "relu" where the relu stops its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arithmetic.reference import scaled, unpacked
from .gradients import add, carried_in_graph, mask_of
from .launch import launch, launched
from .nodes import traced
from .range import PassRange
from .recurrence import FORMS, Recurrence
from .scheme import Gradients, State, check_unchanged, plain


class MomentumGradient:
    """The gradient of a step.

    gv is a multiple of gy, which the block is given anyway. So what comes for token v *is* gy of the step that took
    it, and gv is γ/gain times that. At the last step of a pass gv is 0, and gx is a multiple of gy too: it is left
    out, and the step before makes it. What a block's backward pass holds besides its own tensors is one array, and
    none in the last block.

    Attributes:
        strides: of the state: in this layout are the gradients and the masks.
        masks: by layer, where its relu passed its input, one bit an element.
        versions: by layer, that of the gy which its block was given, before the block had it.
        output_dtypes: by layer, of the blocks' outputs.
        forms: by layer, what its block computes, by its number among `FORMS`; the last entry is for what made v₀.
        observed: layers whose input somebody looks at (`nodes.Rejoin`): there gx is given in full.
    """

    def __init__(self, recurrence: Recurrence, dtype: torch.dtype, kernels: Any, strides: tuple[int, ...]) -> None:
        self.recurrence = recurrence
        self.dtype = dtype
        self.kernels = kernels
        self.strides = strides
        self.forms = [FORMS.index(recurrence.form)] * (len(recurrence.gammas) + 1)
        self.masks: dict[int, Tensor] = {}
        self.observed: set[int] = set()
        self.versions: dict[int, int] = {}
        self.output_dtypes: dict[int, torch.dtype] = {}

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        """Gradients of (token x, token v) and of the block's output; `d` is that of the float x."""
        p, h = tokens
        check_unchanged(h, self.versions.get(k + 1))
        if k < 0:
            return launched(self, add(p, d, self.dtype), None if h is None else h * self.recurrence.carried[0][0])
        if d is None:
            like = h if h is not None else p
            if like is None:
                return [None, None], None
            d = like.new_zeros(()).expand(like.shape)
        form = self.forms[k]
        numbers = (*self.recurrence.carried[k + 1], self.recurrence.factors[k][3], form)
        after = self.masks.get(k + 1) if p is None and h is not None else None
        mask = mask_of(self, k) if form == 2 else None
        left_out = p is None and h is None and wanted[1] and k > 0
        gx: Tensor | None
        if traced(p, h, d):
            self.versions.pop(k, None)
            gx, gy, cast = carried_in_graph(p, h, d, numbers, mask, after, self.strides, self.dtype)
            gx = None if left_out else gx
        else:
            p = p if p is None or p.stride() == self.strides else plain(p, self.strides)
            h = h if h is None or h.stride() == self.strides else plain(h, self.strides)
            d = d if type(d) is Tensor and d.stride() == self.strides else plain(d, self.strides)
            gy = torch.empty_like(d, dtype=self.dtype)
            gx = p if p is not None or left_out else torch.empty_like(gy)  # p is an array of ours, made one step before
            cast = gy
            if self.output_dtypes[k] != self.dtype or mask is not None:
                cast = torch.empty_like(gy, dtype=self.output_dtypes[k])
            self.kernels.carry(p, h, d, *numbers, gx, gy, cast, mask, after)
            if wanted[1]:
                self.versions[k] = gy._version
        if left_out and k in self.observed:  # else the step before makes gx of gy
            _, e, e1 = self.recurrence.carried[k]
            gx = scaled(gy, e, e1, None if mask is None else unpacked(mask, gy.shape, self.strides))
        return [gx, gy if wanted[1] else None], cast

    def enter(self, tokens: Gradients, d: Tensor | None) -> Tensor | None:
        """Of x₀."""
        return add(tokens[0], d, self.dtype)

    def leave(self, gradient: Tensor) -> Gradients:
        """Of (token x, token v), from that of v as a float."""
        return [None, gradient.to(self.dtype)]


EMPTIED = -1
"""Among the buffers: the last one that the way back has done with. At layer 0 it is the first, which must be empty again."""


class Momentum(State):
    """x, v and the information buffers of one forward pass; see `scheme`.

    Args:
        x0: the network's input; its dtype is that of every decoded x, its memory layout that of the state.
        seen: the range of the pass.
        reversible: keep every buffer, so that the steps can be undone; otherwise only those of the next step.
    """

    names = ("v", "x")
    guarded = ("v",)
    gradient_type = MomentumGradient

    def __init__(self, x0: Tensor, recurrence: Recurrence, seen: PassRange, *, reversible: bool) -> None:
        super().__init__(x0, seen, reversible=reversible)
        self.recurrence = recurrence
        (self.x,) = self.begin(x0)
        self.v = torch.zeros_like(self.x)
        # the dtype that plain autograd hands gradients on in; but what is carried is gain times that, which float16 may round to 0
        dtype = x0.dtype if x0.dtype == torch.bfloat16 else seen.fixed.work
        self.blank = torch.zeros((), dtype=dtype, device=x0.device).expand(x0.shape)
        self.gradient = self.gradient_type(recurrence, dtype, self.kernels, self.x.stride())
        self.forms = self.gradient.forms  # by layer, what the kernels make of its block's output

    def rest(self) -> Tensor:
        """v as a float."""
        return self.room().copy_(self.fixed.decode(self.v, self.dtype, self.fixed.guard))

    def launch(self, y: Tensor) -> Tensor:
        return launch(self, y)

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
        out = self.room()
        *step, before, over = self._step(k, y)
        self.gradient.output_dtypes[k] = step[3].dtype
        self.kernels.advance(*step, out, self.range.rows[k + 1], mask, before, over)
        return out

    def draw(self, k: int, out: Tensor | None) -> None:
        self.kernels.pull(self.x, self.v, self.unit, self.fixed.guard, self.room() if out is None else out)

    def undo(self, k: int, y: Tensor, out: Tensor | None) -> None:
        *step, before, over = self._step(k, y)
        self.kernels.retreat(*step, out, before, over)
        if k in self.buffers:
            self.buffers[EMPTIED] = self.buffers.pop(k)

    def _step(self, k: int, y: Tensor) -> tuple[Any, ...]:
        """Arguments of the kernels: x to guard; then the buffer before that of step k with how many bits of its digit go there."""
        y = y.detach()
        if type(y) is not Tensor or y.stride() != self.x.stride() or y.dtype == torch.float64:
            y = plain(y, self.x.stride(), self.fixed.work)
        n, d, _, factor = self.recurrence.factors[k]
        begin, _, over = self.recurrence.places[k]
        numbers = (n, d, factor / self.guarded_unit, self.unit, self.forms[k], self.fixed.guard)
        before = self.buffers[self.recurrence.places[k - 1][0]] if over else None
        return self.x, self.v, self.buffers.get(begin), y, self.dtype, *numbers, before, over

    def reach(self, k: int, f: float) -> tuple[float, float]:
        x = float(self.x.abs().amax()) * self.unit
        v = float(self.v.abs().amax()) * self.guarded_unit
        _, _, gamma, factor = self.recurrence.factors[k]
        v1 = gamma * v + factor * (f + (x if self.gradient.forms[k] else 0.0))
        return x + v1, v1

    def anew(self, x0: Tensor, seen: PassRange) -> Momentum:
        return type(self)(x0, self.recurrence, seen, reversible=self.reversible)
