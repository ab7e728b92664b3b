"""The integers of a reversible state, whatever its scheme: fixed point in, a range that widens when it must, floats out.

A scheme moves its integers in place (`Integers.take`, `draw`, `undo`); this class does the rest of `scheme.State`. Where a step leaves the
range, it is undone, the integers are shifted to the right, and it is taken again. The bits shifted out are kept until the way back.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from ..arithmetic.hash import digest
from ..arithmetic.kernels import kernels_for
from .range import PassRange, shifted, unshifted


@dataclass
class Widening:
    """Before a step: the fixed point until then, the one from then on, and what was shifted out of each tensor."""

    before: FixedPoint
    after: FixedPoint
    rests: dict[str, Tensor]

    def bits(self, guarded: bool) -> int:
        """By how many bits a tensor was shifted, with or without guard digits."""
        fewer = self.before.bits - self.after.bits
        return fewer + self.before.guard - self.after.guard if guarded else fewer


class Integers:
    """The integers of one forward pass, each in a tensor of its own.

    A scheme defines `take`, `draw`, `undo` and `reach`.
    """

    names: ClassVar[tuple[str, ...]]
    """The attributes that hold integers."""
    guarded: ClassVar[tuple[str, ...]] = ()
    """Those with guard digits."""
    tokens = 2
    entered = 1

    def __init__(self, x0: Tensor, seen: PassRange, *, reversible: bool = True) -> None:
        self.range = seen
        self.reversible = reversible
        self.dtype = x0.dtype
        self.kernels = kernels_for(x0)
        self.widenings: dict[int, Widening] = {}

    def take(self, k: int, y: Tensor) -> Tensor:
        """Take step k in place, and note the largest values in row k + 1 of the range; the next block's input."""
        raise NotImplementedError

    def draw(self, k: int, out: Tensor | None) -> None:
        """First half of undoing step k, in place; with `out`, fill it with the block's input."""
        raise NotImplementedError

    def undo(self, k: int, y: Tensor, out: Tensor | None) -> None:
        """Second half of undoing step k, in place; with `out`, `draw(k − 1, out)` after it."""
        raise NotImplementedError

    def reach(self, k: int, f: float) -> tuple[float, float]:
        """How large x and v may be after step k, for a block's output of at most f."""
        raise NotImplementedError

    def input_name(self, k: int) -> str:
        """Which of the integers block k reads."""
        return "x"

    @property
    def fixed(self) -> FixedPoint:
        """The fixed point now."""
        return self.range.fixed

    @property
    def narrow(self) -> bool:
        """Whether integers take fewer bytes than floats."""
        return self.fixed.dtype.itemsize < self.dtype.itemsize

    def advance(self, k: int, y: Tensor) -> Tensor:
        out = self.take(k, y)
        if self.range.fits(k + 1):
            return out
        f = float(y.detach().abs().amax())
        if self.range.given or not math.isfinite(f):
            self.range.refuse(k + 1)
            return out
        self.draw(k, None)
        self.undo(k, y, None)
        self.widen(k, *self.reach(k, f))
        out = self.take(k, y)
        if not self.range.fits(k + 1):  # x does not fit its float
            self.range.refuse(k + 1)
        return out

    def widen(self, k: int, x: float, v: float) -> None:
        """Before step k, make room for |x| and |v| up to these."""
        widening = Widening(self.fixed, self.range.widened(x, v), {})
        for name in self.names:
            high, widening.rests[name] = shifted(getattr(self, name), widening.bits(name in self.guarded))
            setattr(self, name, high)
        if self.reversible:
            self.widenings[k] = widening
        self.range.fixed = widening.after

    def pull(self, k: int) -> Tensor:
        out = self.float()
        widening = self.widenings.get(k)
        if k >= 0:
            self.draw(k, out)
        if widening is None:
            return out if k >= 0 else self.decoded("x", self.fixed)
        return self.decoded(self.input_name(k), widening.before, self.before(self.input_name(k), widening))

    def retreat(self, k: int, y: Tensor) -> None:
        self.undo(k, y, None)
        self.end(k)

    def end(self, k: int) -> None:
        """Step k is undone for good: go back to the range before it."""
        widening = self.widenings.pop(k, None)
        if widening is not None:
            for name in self.names:
                setattr(self, name, self.before(name, widening))
            self.range.fixed = widening.before

    def recede(self, k: int, y: Tensor) -> Tensor:
        if k in self.widenings or k - 1 in self.widenings:
            self.retreat(k, y)
            return self.pull(k - 1)
        out = self.float()
        self.undo(k, y, out)
        self.end(k)
        return out

    def before(self, name: str, widening: Widening) -> Tensor:
        """A tensor as it was before the widening."""
        return unshifted(getattr(self, name), widening.rests[name], widening.bits(name in self.guarded))

    def float(self) -> Tensor:
        """Room for a float like the integers that blocks read."""
        return torch.empty_like(getattr(self, self.names[0]), dtype=self.dtype)

    def decoded(self, name: str, fixed: FixedPoint | None = None, q: Tensor | None = None) -> Tensor:
        """Integers as a float."""
        q = getattr(self, name) if q is None else q
        out = torch.empty_like(q, dtype=self.dtype)
        self.kernels.decode(q, 2.0 ** -(fixed or self.fixed).bits, out)
        return out

    def hash(self) -> Tensor:
        total = digest(getattr(self, self.names[0]))
        for seed, name in enumerate(self.names[1:], start=1):
            digest(getattr(self, name), total, seed)
        return total

    def first_range(self, x0: Tensor) -> PassRange:
        """A range that begins as the one of this pass did."""
        first = min(self.widenings, default=None)
        return self.range.again(x0, self.fixed if first is None else self.widenings[first].before)

    def copy(self) -> Any:
        """A copy that can be moved alone."""
        other = copy.copy(self)
        for name in self.names:
            setattr(other, name, getattr(self, name).clone())
        other.range = copy.copy(self.range)
        other.widenings = dict(self.widenings)
        return other

    def fork(self) -> Any:
        other = self.copy()
        other.reversible = False
        return other

    def free(self) -> None:
        self.widenings = {}
        for name in self.names:
            delattr(self, name)
