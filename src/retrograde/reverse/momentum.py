"""The momentum scheme [sander2021, eq. 2 and 3], in integers.

    forward   v ← γ·v + gain·f(x)     x ← x + ⌊v⌉
    inverse   x ← x − ⌊v⌉             v ← (v − gain·f(x)) / γ

x and v are fixed-point integers (⌊v⌉ is v without its guard digits) and γ·v is an exactly reversible multiplication,
so the inverse recovers every state bit for bit, provided f repeats itself. gain is 1 − γ, or 1 at γ = 1. What a block
computes is its form:

    "branch"   f(x)
    "block"    x + f(x)
    "relu"     f(x), of a network x ← relu(x + f(x)); so f above is relu(x + f(x)) − x

The step is linear in x and v, so its gradient needs no values. With s = gx + gv:

    gy = gain·s      gv ← γ·s      gx ← gx

but gx ← gx − gy for form "block", and for form "relu" where the relu stops its input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.buffers import buffers, straddles
from ..arithmetic.kernels import with_address
from ..arithmetic.ratio import gain
from ..arithmetic.reference import carried, packed, scaled, unpacked
from ..errors import ReplayError
from .nodes import keeps_graph, traced
from .range import MOST_GUARD, PassRange
from .scheme import CHANGED_GRADIENT, Gradients, State

FORMS = ("branch", "block", "relu")
"""By number in the kernels."""


@dataclass(frozen=True)
class Recurrence:
    """What one momentum network computes, apart from its blocks."""

    gammas: tuple[Fraction, ...]
    form: str
    narrow: bool = False  # x and v are held in 16 bits
    signed: bool = False  # γ is of random sign: see `sign`

    def __reduce__(self) -> Any:
        return Recurrence, (self.gammas, self.form, self.narrow, self.signed)

    @cached_property
    def factors(self) -> list[tuple[int, int, float, float]]:
        """n, d, γ and the factor on f, layer by layer. With a random sign f comes with its factor."""
        return [(g.numerator, g.denominator, float(g), 1.0 if self.signed else float(gain(g))) for g in self.gammas]

    @cached_property
    def carried(self) -> list[tuple[float, float, float]]:
        """In units of gy of layer k: gv before it; gx where gv after it was 0; the same where a relu passed its input.

        The entry after the last is for v's own gradient.
        """
        less = self.form != "branch"
        units = [
            (gamma / factor, (1 - factor if less else 1.0) / factor, 1 / factor) for *_, gamma, factor in self.factors
        ]
        return [*units, (1.0, 0.0, 0.0)]

    @cached_property
    def most_guard(self) -> int:
        """How many guard digits v may have: v is at most Σ gain times the largest f, so near γ = 1 it is smaller still."""
        reach = min(1.0, sum(factor for *_, factor in self.factors))
        return MOST_GUARD + math.ceil(math.log2(1 / reach)) if reach else MOST_GUARD

    @cached_property
    def plain(self) -> bool:
        """Whether a step is that of a plain residual network (γ = 0): it forgets v and cannot be undone."""
        return 0 in self.gammas

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Memory plans worked out for it (`memory.modes.leanest`)."""
        return {}

    @cached_property
    def begins(self) -> dict[int, torch.dtype | None]:
        """Where the information buffers begin, and their dtypes."""
        return buffers(self.gammas)

    @cached_property
    def straddles(self) -> dict[int, int]:
        """Where a step takes bits to the buffer before its own, too, and how many."""
        return straddles(self.gammas)


class MomentumGradient:
    """The gradient of a step.

    gv is a multiple of gy, which the block is given anyway. So what comes for token v *is* gy of the step that took
    it, and gv is γ/gain times that. At the last step of a pass gv is 0, and gx is a multiple of gy too: it is left
    out, and the step before makes it. What a block's backward pass holds besides its own tensors is one array, and
    none in the last block.

    Attributes:
        masks: by layer, where its relu passed its input, one bit an element.
        versions: by layer, that of the gy which its block was given, before the block had it.
        output_dtypes: by layer, of the blocks' outputs.
        forms: by layer, what its block computes, where it is not the form of the recurrence.
        observed: layers whose input somebody looks at (`nodes.Rejoin`): there gx is given in full.
    """

    def __init__(self, recurrence: Recurrence, dtype: torch.dtype, kernels: Any) -> None:
        self.recurrence = recurrence
        self.dtype = dtype
        self.kernels = kernels
        self.form = FORMS.index(recurrence.form)
        self.strides: tuple[int, ...] = ()
        self.masks: dict[int, Tensor] = {}
        self.forms: dict[int, int] = {}
        self.observed: set[int] = set()
        self.versions: dict[int, int] = {}
        self.output_dtypes: dict[int, torch.dtype] = {}

    def form_of(self, k: int) -> int:
        """What block k computes, by its number among `FORMS`."""
        return self.forms.get(k, self.form)

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        """Gradients of (token x, token v) and of the block's output; `d` is that of the float x."""
        p, h = tokens
        self.check_unchanged(k + 1, h)
        if k < 0:
            return self.launched(add(p, d, self.dtype), None if h is None else h * self.recurrence.carried[0][0])
        if p is None and h is None and d is None:
            return [None, None], None
        given = next(g for g in (d, h, p) if g is not None)
        d = given.new_zeros(()).expand(given.shape) if d is None else d if type(d) is Tensor else with_address(d)
        factors = (*self.recurrence.carried[k + 1], self.recurrence.factors[k][3], self.form_of(k))
        after = self.masks.get(k + 1) if p is None and h is not None else None
        mask = self._kept(k) if self.form_of(k) == 2 else None
        left_out = p is None and h is None and wanted[1] and k > 0
        if traced(p, h, d):
            passed, passed_after = (None if m is None else unpacked(m, d.shape, self.strides) for m in (mask, after))
            out, g = carried(p, h, d, factors, passed, passed_after)
            gy = g.to(self.dtype)
            self.versions.pop(k, None)
            block = g if passed is None else torch.where(passed, g, 0)
            gx = self._left_out(k, gy, mask) if left_out else out.to(self.dtype)
            return [gx, gy if wanted[1] else None], block
        gy = torch.empty_like(d, dtype=self.dtype)
        if mask is not None or after is not None:  # their bits are in the order of the state
            gy = d.new_empty_strided(d.shape, self.strides, dtype=self.dtype)
        into = None
        if p is not None and p.stride() == gy.stride():
            into = p  # an array of ours, made one step before
        elif not left_out:
            into = torch.empty_like(gy)
        cast = gy
        if self.output_dtypes[k] != self.dtype or mask is not None:
            cast = torch.empty_like(gy, dtype=self.output_dtypes[k])
        self.kernels.carry(p, h, d, factors, into, gy, cast, mask, after)
        if not wanted[1]:
            return [into, None], cast
        self.versions[k] = gy._version
        return [self._left_out(k, gy, mask) if left_out else into, gy], cast

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

    def launched(self, gx: Tensor | None, gv: Tensor | None) -> tuple[Gradients, Tensor | None]:
        """Of the step that set v₀ = f(x₀)."""
        if gv is None:
            return [gx, None], None
        gx, gy = self.through_form(-1, gx, gv)
        return [gx, None], gy

    def through_form(self, k: int, gx: Tensor | None, gf: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of x and of block k's output y, from those of x and of f, which form "block" or "relu" makes of both."""
        if self.form_of(k) != 2:
            return (add(gx, -gf, self.dtype) if self.form_of(k) else gx), gf
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

    def _left_out(self, k: int, gy: Tensor, mask: Tensor | None) -> Tensor | None:
        """gx where the step before can make it from gy: None; where somebody looks at x: gx itself."""
        if k not in self.observed:
            return None
        _, e, e1 = self.recurrence.carried[k]
        return scaled(gy, e, e1, None if mask is None else unpacked(mask, gy.shape, self.strides))


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

    def __init__(self, x0: Tensor, recurrence: Recurrence, seen: PassRange, *, reversible: bool) -> None:
        super().__init__(x0, seen, reversible=reversible)
        self.recurrence = recurrence
        self.buffers: list[Tensor | None] = []
        self.leftover: Tensor | None = None  # at layer 0 again: the first buffer, to be seen empty
        # the dtype that plain autograd hands gradients on in; but what is carried is gain times that, which float16 may round to 0
        dtype = x0.dtype if x0.dtype == torch.bfloat16 else seen.fixed.work
        self.gradient = MomentumGradient(recurrence, dtype, self.kernels)
        self.blank = torch.zeros((), dtype=dtype, device=x0.device).expand(x0.shape)
        self.x = torch.empty_like(x0.detach(), dtype=seen.fixed.dtype)
        self.v = torch.zeros_like(self.x)
        self.gradient.strides = self.x.stride()
        self.start: Tensor | None = self.room()  # x₀ decoded, until the pass takes it
        self._encode(x0.detach(), self.x, self.start, column=1)

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
            return self._launch(y)
        if k in self.recurrence.begins:
            dtype = self.recurrence.begins[k]
            kept = self.buffers if self.reversible else self.buffers[-1:] if k in self.recurrence.straddles else []
            self.buffers = [*kept, None if dtype is None else torch.zeros_like(self.x, dtype=dtype)]
        return super().advance(k, y)

    def take(self, k: int, y: Tensor) -> Tensor:
        out = self.room()
        self.gradient.output_dtypes[k] = y.dtype
        mask = None
        if self.form_of(k) == 2:
            mask = torch.empty(-(-self.x.numel() // 8), dtype=torch.uint8, device=self.x.device)
            self.gradient.masks[k] = mask
        arguments, watch = self._arguments(k, y), self.range.rows[k + 1]
        self.kernels.advance(self.x, self.v, self.buffers[-1], *arguments, out, watch, mask, *self._before(k))
        return out

    def draw(self, k: int, out: Tensor | None) -> None:
        out = self.room() if out is None else out
        self.kernels.pull(self.x, self.v, 2.0**-self.fixed.bits, self.fixed.guard, out)

    def undo(self, k: int, y: Tensor, out: Tensor | None) -> None:
        self.kernels.retreat(self.x, self.v, self.buffers[-1], *self._arguments(k, y), out, *self._before(k))

    def end(self, k: int) -> None:
        super().end(k)
        if k in self.recurrence.begins:
            self.leftover = self.buffers.pop()

    def reach(self, k: int, f: float) -> tuple[float, float]:
        x = float(self.x.abs().amax()) * 2.0**-self.fixed.bits
        v = float(self.v.abs().amax()) * 2.0 ** -(self.fixed.bits + self.fixed.guard)
        _, _, gamma, factor = self.recurrence.factors[k]
        v1 = gamma * v + factor * (f + (x if self.gradient.form_of(k) else 0.0))
        return x + v1, v1

    def rewound(self, v0: Tensor | None) -> bool:
        """At layer 0: whether v and the buffer are back at their initial values, so that every step was undone."""
        moved = self.v if v0 is None else self.v - v0
        return not moved.any() and (self.leftover is None or not self.leftover.any())

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

    def _launch(self, y: Tensor) -> Tensor:
        """Set v to f of y, an output on x₀."""
        gradient = self.gradient
        form = gradient.form_of(-1)
        x0 = self.read()
        v0 = y.detach()
        if form:
            seen = x0.to(self.fixed.work)
            if form == 2:
                v0 = torch.relu((seen + v0.to(seen.dtype)).to(v0.dtype))
                gradient.masks[-1] = packed(~(v0 <= 0), self.x)
            v0 = v0.to(seen.dtype) - seen
        if self.range.looks and not self.range.given and v0.numel() and bool(v0.isfinite().all()):
            x, v = float(self.x.abs().amax()) * 2.0**-self.fixed.bits, float(v0.abs().amax())
            wider = self.range.widened(x, v)
            if wider != self.fixed:
                self.range.rows[0][1] *= 2.0 ** (wider.bits - self.fixed.bits)  # |x₀| in the new units
                self.widen(-1, x, v)
                x0 = self.read()
        self._encode(v0, self.v, None, column=0, guard=self.fixed.guard)
        return x0

    def _encode(self, x: Tensor, q: Tensor, out: Tensor | None, column: int, guard: int = 0) -> None:
        fixed = self.fixed
        self.kernels.encode(x, 2.0 ** (fixed.bits + guard), 2.0**-fixed.bits, q, out, self.range.rows[0], column)
        if not self.range.fits(0):
            self.range.refuse(0)

    def _arguments(self, k: int, y: Tensor) -> tuple[Tensor, torch.dtype, int, int, float, float, int, int]:
        """Of the kernels: y, the dtype of x̃, n, d, scale, unit, form and guard."""
        n, d, _, factor = self.recurrence.factors[k]
        scale = factor * 2.0 ** (self.fixed.bits + self.fixed.guard)
        y = y.detach()
        y = y if type(y) is Tensor else with_address(y)
        return y, self.dtype, n, d, scale, 2.0**-self.fixed.bits, self.form_of(k), self.fixed.guard

    def form_of(self, k: int) -> int:
        """What is made of block k's output in the kernels."""
        return self.gradient.form_of(k)

    def _before(self, k: int) -> tuple[Tensor | None, int]:
        """The buffer before that of step k, and how many bits of the step's digit go there."""
        over = self.recurrence.straddles.get(k, 0)
        return self.buffers[-2] if over else None, over
