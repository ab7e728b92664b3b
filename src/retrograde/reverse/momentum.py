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

from ..arithmetic.kernels import with_address
from ..arithmetic.reference import carried, scaled, unpacked
from ..errors import ReplayError
from .launch import launch, launched
from .nodes import keeps_graph, traced
from .range import PassRange
from .recurrence import FORMS, Recurrence
from .scheme import CHANGED_GRADIENT, Gradients, State


class MomentumGradient:
    """The gradient of a step.

    gv is a multiple of gy, which the block is given anyway. So what comes for token v *is* gy of the step that took
    it, and gv is γ/gain times that. At the last step of a pass gv is 0, and gx is a multiple of gy too: it is left
    out, and the step before makes it. What a block's backward pass holds besides its own tensors is one array, and
    none in the last block.

    Attributes:
        strides: of the state: in this layout are the masks.
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
        self.check_unchanged(k + 1, h)
        if k < 0:
            return launched(self, add(p, d, self.dtype), None if h is None else h * self.recurrence.carried[0][0])
        given = d if d is not None else h if h is not None else p
        if given is None:
            return [None, None], None
        if d is None:
            d = given.new_zeros(()).expand(given.shape)
        elif type(d) is not Tensor:
            d = with_address(d)
        form = self.forms[k]
        factors = (*self.recurrence.carried[k + 1], self.recurrence.factors[k][3], form)
        after = self.masks.get(k + 1) if p is None and h is not None else None
        mask = self._kept(k) if form == 2 else None
        left_out = p is None and h is None and wanted[1] and k > 0
        if traced(p, h, d):
            passed, passed_after = (None if m is None else unpacked(m, d.shape, self.strides) for m in (mask, after))
            out, g = carried(p, h, d, factors, passed, passed_after)
            gy = g.to(self.dtype)
            self.versions.pop(k, None)
            cast = g if passed is None else torch.where(passed, g, 0)
            gx = None if left_out else out.to(self.dtype)
        else:
            gy = torch.empty_like(d, dtype=self.dtype)
            if mask is not None or after is not None:  # their bits are in the order of the state
                gy = d.new_empty_strided(d.shape, self.strides, dtype=self.dtype)
            gx = None
            if p is not None and p.stride() == gy.stride():
                gx = p  # an array of ours, made one step before
            elif not left_out:
                gx = torch.empty_like(gy)
            cast = gy
            if self.output_dtypes[k] != self.dtype or mask is not None:
                cast = torch.empty_like(gy, dtype=self.output_dtypes[k])
            self.kernels.carry(p, h, d, factors, gx, gy, cast, mask, after)
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

    def check_unchanged(self, k: int, h: Tensor | None) -> None:
        """Raise if block k changed the gradient that it was given."""
        if h is not None and h._version != self.versions.get(k, h._version):
            raise ReplayError(CHANGED_GRADIENT)

    def through_form(self, k: int, gx: Tensor | None, gf: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of x and of block k's output y, from those of x and of f, which form "block" or "relu" makes of both."""
        if self.forms[k] != 2:
            return (add(gx, -gf, self.dtype) if self.forms[k] else gx), gf
        passed = unpacked(self._kept(k), gf.shape, self.strides)
        return add(gx, -torch.where(passed, 0, gf), self.dtype), torch.where(passed, gf, 0)

    def _kept(self, k: int) -> Tensor:
        """A mask; those above it are let go of, unless the graph is to be run through again."""
        if k not in self.masks:
            raise RuntimeError(
                "The backward pass of this network has run. To run it twice, pass retain_graph=True to the first."
            )
        if not keeps_graph():
            self.masks.pop(k + 2, None)
            if k == 0:
                self.masks.pop(1, None)
                return self.masks.pop(0)
        return self.masks[k]


def add(a: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """a + b in this dtype, into a's memory where it is an array and no graph is made of it; b is never written to."""
    if a is None or b is None:
        return a if b is None else b.to(dtype, copy=True)
    return a + b if traced(a, b) or 0 in a.stride() else a.add_(b)


class Momentum(State):
    """x, v and the information buffers of one forward pass; see `scheme`.

    Args:
        x0: the network's input; its dtype is that of every decoded x, its memory layout that of the state.
        seen: the range of the pass.
        reversible: keep every buffer, so that the steps can be undone; otherwise only the current one.
    """

    names = ("v", "x")
    guarded = ("v",)
    gradient_type = MomentumGradient

    def __init__(self, x0: Tensor, recurrence: Recurrence, seen: PassRange, *, reversible: bool) -> None:
        super().__init__(x0, seen, reversible=reversible)
        self.recurrence = recurrence
        self.buffers: list[Tensor | None] = []
        self.leftover: Tensor | None = None  # at layer 0 again: the first buffer, to be seen empty
        self.x = torch.empty_like(x0.detach(), dtype=seen.fixed.dtype)
        self.v = torch.zeros_like(self.x)
        # the dtype that plain autograd hands gradients on in; but what is carried is gain times that, which float16 may round to 0
        dtype = x0.dtype if x0.dtype == torch.bfloat16 else seen.fixed.work
        self.blank = torch.zeros((), dtype=dtype, device=x0.device).expand(x0.shape)
        self.gradient = self.gradient_type(recurrence, dtype, self.kernels, self.x.stride())
        self.forms = self.gradient.forms  # by layer, what the kernels make of its block's output
        self.start: Tensor | None = self.room()  # x₀ decoded, until the pass takes it
        self.encode(x0.detach(), self.x, self.start, column=1)

    def encode(self, x: Tensor, q: Tensor, out: Tensor | None, column: int, guard: int = 0) -> None:
        """Fill q with x as integers, out with what they stand for, and a column of the range's first row."""
        fixed = self.fixed
        self.kernels.encode(x, 2.0 ** (fixed.bits + guard), 2.0**-fixed.bits, q, out, self.range.rows[0], column)
        if not self.range.fits(0):
            self.range.refuse(0)

    def token(self) -> Tensor:
        return self.blank.detach()

    def read(self) -> Tensor:
        out, self.start = self.start, None
        return self.decoded("x") if out is None else out

    def rest(self) -> Tensor:
        """v as a float."""
        return self.room().copy_(self.fixed.decode(self.v, self.dtype, self.fixed.guard))

    def advance(self, k: int, y: Tensor) -> Tensor:
        """Take step k; with k = −1, set v to f of an output y."""
        if k < 0:
            return launch(self, y)
        if k in self.recurrence.begins:
            dtype = self.recurrence.begins[k]
            kept = self.buffers if self.reversible else self.buffers[-1:] if k in self.recurrence.straddles else []
            self.buffers = [*kept, None if dtype is None else torch.zeros_like(self.x, dtype=dtype)]
        return super().advance(k, y)

    def take(self, k: int, y: Tensor) -> Tensor:
        out = self.room()
        self.gradient.output_dtypes[k] = y.dtype
        mask = None
        if self.forms[k] == 2:
            mask = torch.empty(-(-self.x.numel() // 8), dtype=torch.uint8, device=self.x.device)
            self.gradient.masks[k] = mask
        arguments, straddling = self._arguments(k, y)
        self.kernels.advance(*arguments, out, self.range.rows[k + 1], mask, *straddling)
        return out

    def draw(self, k: int, out: Tensor | None) -> None:
        out = self.room() if out is None else out
        self.kernels.pull(self.x, self.v, 2.0**-self.fixed.bits, self.fixed.guard, out)

    def undo(self, k: int, y: Tensor, out: Tensor | None) -> None:
        arguments, straddling = self._arguments(k, y)
        self.kernels.retreat(*arguments, out, *straddling)

    def _arguments(self, k: int, y: Tensor) -> tuple[tuple[Any, ...], tuple[Tensor | None, int]]:
        """Of the kernels: x to guard; and the buffer before that of step k with how many bits of the step's digit go there."""
        n, d, _, factor = self.recurrence.factors[k]
        fixed = self.fixed
        y = y.detach()
        y = y if type(y) is Tensor else with_address(y)
        numbers = (n, d, factor * 2.0 ** (fixed.bits + fixed.guard), 2.0**-fixed.bits, self.forms[k], fixed.guard)
        over = self.recurrence.straddles.get(k, 0)
        return (self.x, self.v, self.buffers[-1], y, self.dtype, *numbers), (self.buffers[-2] if over else None, over)

    def end(self, k: int) -> None:
        super().end(k)
        if k in self.recurrence.begins:
            self.leftover = self.buffers.pop()

    def reach(self, k: int, f: float) -> tuple[float, float]:
        x = float(self.x.abs().amax()) * 2.0**-self.fixed.bits
        v = float(self.v.abs().amax()) * 2.0 ** -(self.fixed.bits + self.fixed.guard)
        _, _, gamma, factor = self.recurrence.factors[k]
        v1 = gamma * v + factor * (f + (x if self.gradient.forms[k] else 0.0))
        return x + v1, v1

    def rewound(self, v0: Tensor | None) -> bool:
        """At layer 0: whether v and the buffer are back at their initial values, so that every step was undone."""
        moved = self.v if v0 is None else self.v - v0
        return not moved.any() and (self.leftover is None or not self.leftover.any())

    def anew(self, x0: Tensor, seen: PassRange) -> Momentum:
        return type(self)(x0, self.recurrence, seen, reversible=self.reversible)

    def copy(self) -> Momentum:
        other: Momentum = super().copy()
        other.buffers = [None if b is None else b.clone() for b in self.buffers]
        return other

    def fork(self) -> Momentum:
        kept, self.buffers = self.buffers, self.buffers[-1:]  # the copy goes on with the last buffer alone
        try:
            other: Momentum = super().fork()
        finally:
            self.buffers = kept
        return other

    def free(self) -> None:
        super().free()
        self.buffers = []
        self.leftover = None
        self.start = None
