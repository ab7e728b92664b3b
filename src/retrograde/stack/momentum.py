"""The state of a momentum network as integers, one step on and one step back.

    forward   v ← γ·v + gain·f(x)     x ← x + ⌊v⌉
    inverse   x ← x − ⌊v⌉             v ← (v − gain·f(x)) / γ

x and v are fixed-point integers (⌊v⌉: v without its guard digits, see `ops`) and γ·v is an exactly reversible
multiplication, so the inverse recovers every state bit for bit, provided f repeats itself. gain is 1 − γ, or 1 at γ = 1.
What f is to the blocks says `Recurrence.form`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.errors import RangeOverflow
from ..core.fixedpoint import FixedPoint
from ..core.ops import bodies, rounded, values
from ..core.rational import gain
from ..core.verify import digest
from .buffers import buffers
from .headroom import MOST_GUARD
from .thread import SameThread

FORMS = ("branch", "block", "relu")
"""What a block computes: f(x); x + f(x); or f(x), of a network x ← relu(x + f(x)). By number in `ops`."""


@dataclass(frozen=True)
class Recurrence:
    """What one momentum network computes, apart from its blocks."""

    gammas: tuple[Fraction, ...]
    form: str  # one of FORMS
    narrow: bool = False  # x and v are held in 16 bits

    def __reduce__(self) -> Any:
        return Recurrence, (self.gammas, self.form, self.narrow)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From a pickle that held what follows from the fields, too: as it was worked out then."""
        self.__dict__.update({name: state[name] for name in ("gammas", "form", "narrow") if name in state})

    @cached_property
    def factors(self) -> list[tuple[int, int, float, float]]:
        """n, d, γ and the factor on f, layer by layer."""
        return [(g.numerator, g.denominator, float(g), float(gain(g))) for g in self.gammas]

    @cached_property
    def carried(self) -> list[tuple[float, float, float]]:
        """What gv is, what gx is where gv was 0, and what it is there if a relu let its input through, in units of the gradient of
        each block's output; last: of v's own gradient (`graph`)."""
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
        """Whether a step of it is that of a plain residual network, which cannot be undone."""
        return 0 in self.gammas

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """What has been worked out of it (`memory.modes.leanest`), and need not be again in every pass."""
        return {}

    @cached_property
    def begins(self) -> dict[int, torch.dtype | None]:
        """Where the information buffers begin, and their dtypes."""
        return buffers(self.gammas)


@dataclass(frozen=True)
class Outcome:
    """What is needed to judge a pass by its `watch`, once that is known."""

    recurrence: Recurrence
    fixed: FixedPoint
    limits: tuple[float, float]
    raises: bool


class Momentum:
    """x, v and the information buffers of one forward pass.

    Args:
        x0: the network's input; its dtype is that of every decoded x, its memory layout that of the state.
        reversible: keep every buffer, so that the steps can be undone; otherwise only the current one.
        overflow: "raise" at the step that leaves the range (on an accelerator: later, without waiting for the device), or
            "nan": leave it to the caller to look at `watch`.
    """

    def __init__(
        self, x0: Tensor, recurrence: Recurrence, fixed: FixedPoint, *, reversible: bool, overflow: str
    ) -> None:
        self.recurrence, self.fixed, self.reversible = recurrence, fixed, reversible
        self.dtype, self.shape, self.unit = x0.dtype, x0.shape, 2.0**-fixed.bits
        self.begins, self._form = recurrence.begins, FORMS.index(recurrence.form)
        self.entered: set[int] = set()  # steps whose x is given all of its gradient (`rejoin.Rejoin`)
        self.whole: set[int] = set()  # steps of form "relu" whose block gives relu(x + f) itself: "block"
        largest = torch.finfo(x0.dtype).max * 2.0**fixed.bits if fixed.bits < 900 else fixed.limit
        self.limits = (fixed.limit, min(fixed.limit, largest))  # of |v| and |x|, as integers; x must fit its float
        self.buffers: list[Tensor | None] = []
        self.leftover: Tensor | None = None  # at layer 0 again: the first buffer, to be seen empty
        self.raises = overflow == "raise"
        self.eager = self.raises and x0.device.type == "cpu"
        # rows 16 bytes apart: aligned as kernels like it
        self.watch = torch.zeros(len(recurrence.gammas) + 1, 4, dtype=torch.float32, device=x0.device)[:, :2]
        self.rows = self.watch.unbind()
        self.thread = SameThread() if x0.is_cuda and torch.is_grad_enabled() else None
        # the dtype that plain autograd hands gradients on in; but what is carried is gain times that, which float16 may round to 0
        self.gradient = x0.dtype if x0.dtype == torch.bfloat16 else fixed.work
        self.blank = torch.zeros((), dtype=self.gradient, device=x0.device).expand(x0.shape)
        self.scale, self.guard = 2.0 ** (fixed.bits + fixed.guard), fixed.guard
        self.ops = bodies(x0)
        self.start: Tensor | None = None  # x₀ decoded, until the pass takes it
        self.x = self._encoded(x0)
        self.v = torch.zeros_like(self.x)

    def token(self) -> Tensor:
        """A stand-in of the shape of x, or v, that carries gradients and holds no values."""
        return self.blank.detach()

    def first(self) -> Tensor:
        """x₀ as a float; for the pass that has just begun."""
        x, self.start = self.start, None
        return self.read() if x is None else x

    def read(self) -> Tensor:
        """x as a float."""
        return decoded(self.x, self.fixed, self.dtype)

    @property
    def narrow(self) -> bool:
        """Whether x takes fewer bytes than as a float."""
        return self.x.element_size() < self.dtype.itemsize

    def read_velocity(self) -> Tensor:
        """v as a float."""
        return self._float().copy_(self.fixed.decode(self.v, self.dtype, self.guard))

    def launch(self, y: Tensor, form: str) -> Tensor | None:
        """Set the initial velocity to f of an output y; where its relu let its input through, if it has one."""
        v0, x0, passed = y, self.read().to(self.fixed.work), None
        if form == "relu":
            v0 = torch.relu((x0 + y.to(x0.dtype)).to(y.dtype))
            passed = ~(v0 <= 0)
        self.v.copy_(self._encoded(v0 if form == "branch" else v0.to(x0.dtype) - x0, velocity=True))
        return passed

    def form(self, k: int) -> int:
        """What block k computes, by its number among `FORMS`."""
        return 1 if k in self.whole else self._form

    def mask(self, k: int) -> Tensor | None:
        """Room for what the relu of step k lets through, if it has one."""
        if self.form(k) < 2:
            return None
        return torch.empty(-(-self.x.numel() // 8), dtype=torch.uint8, device=self.x.device)

    def advance(self, k: int, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Take step k with the block's output y; the next block's input."""
        if k in self.begins:
            dtype = self.begins[k]
            self.buffers = self.buffers if self.reversible else []
            self.buffers.append(None if dtype is None else torch.zeros_like(self.x, dtype=dtype))
        out = self._float()
        self.ops.advance_(self.x, self.v, self.buffers[-1], *self._step(k, y), self.guard, out, self.rows[k + 1], mask)
        self._check(k + 1)
        return out

    def pull(self) -> Tensor:
        """First half of a step back: x; the block's input again."""
        out = self._float()
        self.ops.pull_(self.x, self.v, self.unit, self.guard, out)
        return out

    def push(self) -> None:
        """Undo `pull`."""
        self.x.add_(rounded(self.v, self.guard))

    def retreat(self, k: int, y: Tensor) -> None:
        """Second half of a step back: v, from the output of block k on the x that `pull` gave."""
        self._retreat(k, y, None)

    def recede(self, k: int, y: Tensor) -> Tensor:
        """`retreat`, then `pull`, in one."""
        out = self._float()
        self._retreat(k, y, out)
        return out

    def _retreat(self, k: int, y: Tensor, out: Tensor | None) -> None:
        self.ops.retreat_(self.x, self.v, self.buffers[-1], *self._step(k, y), self.guard, out)
        if k in self.begins:
            self.leftover = self.buffers.pop()

    def mark(self) -> Tensor:
        """A hash of v, by which it is known again."""
        return digest(self.v)

    def rewound(self, v0: Tensor | None) -> bool:
        """At layer 0: whether v and the buffer are back at their initial values, so that every step was undone."""
        moved = self.v if v0 is None else self.v - v0
        return not moved.any() and (self.leftover is None or not self.leftover.any())

    def fork(self) -> Momentum:
        """A copy that goes on alone, forwards only."""
        other = copy.copy(self)
        other.x, other.v, other.reversible = self.x.clone(), self.v.clone(), False
        other.buffers = [None if b is None else b.clone() for b in self.buffers[-1:]]
        return other

    def outcome(self) -> Outcome:
        return Outcome(self.recurrence, self.fixed, self.limits, self.raises)

    def free(self) -> None:
        """Let go of every tensor of the state."""
        self.buffers, self.leftover = [], None
        del self.x, self.v

    def _float(self) -> Tensor:
        return torch.empty_like(self.x, dtype=self.dtype)

    def _encoded(self, x: Tensor, velocity: bool = False) -> Tensor:
        """x, or v with its guard digits, as integers, dense in memory."""
        x, guard = x.detach(), self.fixed.guard if velocity else 0
        scale, row, column = 2.0 ** (self.fixed.bits + guard), self.rows[0], int(not velocity)
        q, faster = torch.empty_like(x, dtype=self.fixed.dtype), getattr(self.ops, "encode", None)
        out = None if velocity or faster is None else torch.empty_like(q, dtype=self.dtype)
        if faster is not None and faster(x, scale, self.unit, q, out, row, column):
            self.start = out  # decoded in the same pass over memory
        else:
            q.copy_(self.fixed.encode(x, guard))
            if x.numel():
                row[column] = x.abs().amax().float() * scale
        self._check(0)
        return q

    def _step(self, k: int, y: Tensor) -> tuple[Tensor, torch.dtype, int, int, float, float, int]:
        n, d, _, factor = self.recurrence.factors[k]
        return values(y.detach()), self.dtype, n, d, factor * self.scale, self.unit, self.form(k)

    def _check(self, row: int) -> None:
        if self.eager:
            v, x = self.rows[row].tolist()
            if not (v <= self.limits[0] and x <= self.limits[1]):
                check_range([(v, x)], self.fixed, self.limits, row)


def decoded(q: Tensor, fixed: FixedPoint, dtype: torch.dtype) -> Tensor:
    """x as a float, from its integers and laid out as they are; in one pass over memory where there is a kernel for it."""
    out, unit, faster = torch.empty_like(q, dtype=dtype), 2.0**-fixed.bits, getattr(bodies(q), "decode", None)
    if faster is None or not faster(q, unit, out):
        if dtype == fixed.work:
            out.copy_(q).mul_(unit)
        else:
            out.copy_(fixed.decode(q, dtype))
    return out


def check_range(
    watch: Sequence[Sequence[float]], fixed: FixedPoint, limits: tuple[float, float], first: int = 0
) -> None:
    """Raise if a row of `watch` (largest |v|, |x| after each step; row 0: the start) is out of range or not finite."""
    for row, (v, x) in enumerate(watch, start=first):
        if v <= limits[0] and x <= limits[1]:
            continue
        source = f"out of block {row - 1}" if row else f"in the {'initial velocity' if x <= limits[1] else 'input'}"
        if not (v < float("inf") and x < float("inf")):
            raise RangeOverflow(
                f"NaN or Inf {source}. Nothing was kept; find where it comes from, or pass overflow='nan' to let it through."
            )
        which = int(x > limits[1])
        value, bits = (x, fixed.bits) if which else (v, fixed.bits + fixed.guard)
        raise RangeOverflow(
            f"|{'vx'[which]}| = {value * 2.0**-bits:.4g} {source} is beyond {limits[which] * 2.0**-bits:.4g}, the range "
            f"of fraction_bits={fixed.bits}. Pass fewer fraction_bits (with 'auto' the next call calibrates anew), or look for "
            "activations that grow without bound."
        )
