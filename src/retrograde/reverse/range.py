"""The range of the fixed point: how large the values of a pass may become, and how finely they are held.

A pass begins with the range that the passes before it have shown to be right, or, where there are none, with one made
for the magnitude of its input. Where a step would leave it, the step is undone, the integers are shifted to the
right, the bits shifted out are kept beside the state, and the step is taken again (`PassRange`, `shifted`). So no
value leaves the range, nothing is run twice, and the way back is as exact as ever.

That takes one look at the largest values after every step. On a CPU it costs nothing worth saving. On an accelerator
it would make the host wait, so there only the first pass looks; later ones leave it to a deferred check (`deferred`),
with a few bits to spare.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..arithmetic.fixed import FixedPoint, integer_dtype
from ..errors import RangeOverflow
from .deferred import FIRST_STEP, Deferred, capturing

HEADROOM = 3
"""Bits kept free above the largest value seen; one less of 16, which have none to waste."""
MOST_GUARD = 6
"""Guard digits of v at most, whatever v was: branches that start at zero grow quickly."""
MOST_BITS = 107
"""Fraction bits at most: 2^bits, and as much again for the guard digits, are float32 numbers."""
YIELDED = 6
"""Bits that evaluation gives up at most to hold what training had to."""
_FEW = {torch.int16: 3, torch.int32: 11, torch.int64: 24}
"""Binary digits of the largest |x₀| below which a pass is said to be coarse. For 32-bit integers: what TF32 has."""

_FEW_OF_CHANNELS = {torch.int16: 7, torch.int32: 9, torch.int64: 9}
"""Binary digits, guard digits included, of a tenth of the channels, below which their gradients lose whole percents; with 16
bits, more of them."""
_RATIO_OF_CHANNELS = 6
"""Channels that differ by fewer bits in size are not what makes digits few: the whole input is small beside what follows."""

Outcome = tuple[FixedPoint, tuple[float, float], bool, bool]
"""Of a pass: its fixed point, its limits, whether to raise, whether the fixed point was given by the user."""


def calibrated(x: float, v: float, dtype: torch.dtype, most_guard: int = MOST_GUARD) -> FixedPoint:
    """The finest fixed point that holds |x| and |v| up to these with `HEADROOM` bits to spare. 0 says nothing.

    >>> calibrated(5.0, 0.2, torch.int32)
    FixedPoint(bits=24, dtype=torch.int32, guard=5)
    """
    capacity = 8 * dtype.itemsize - 2 - _headroom(dtype)
    x = x or v or 1.0
    bits_x = min(capacity - math.frexp(x)[1], MOST_BITS)
    bits_v = min(capacity - math.frexp(v or x)[1], MOST_BITS)
    bits = min(bits_x, bits_v)
    return FixedPoint(bits, dtype, min(bits_v - bits, most_guard))


def followed(fixed: FixedPoint, x: float, v: float, most_guard: int = MOST_GUARD) -> FixedPoint:
    """The fixed point for the next pass, given the largest |x| and |v| of this one.

    It is left alone while about 1 to 7 bits are free (1 to 3 of 16), so that it moves rarely.
    """
    ideal = calibrated(x, v, fixed.dtype, most_guard)
    moves = (fixed.bits - ideal.bits, fixed.bits + fixed.guard - ideal.bits - ideal.guard)
    free = _headroom(fixed.dtype)
    widest = 1 if fixed.dtype == torch.int16 else free + 1
    return fixed if all(-widest <= move < free for move in moves) else ideal


def wider(a: FixedPoint, b: FixedPoint, most: int) -> FixedPoint:
    """Wide enough for what either holds, as far as that costs a at most so many bits."""
    bits = max(min(a.bits, b.bits), a.bits - most)
    bits_v = max(min(a.bits + a.guard, b.bits + b.guard), a.bits + a.guard - most)
    return replace(a, bits=bits, guard=max(bits_v - bits, 0))


def shifted(q: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """q·2^−by, rounded, and the rest: q = shifted·2^by + rest. The rest takes as few bytes as it can.

    >>> high, rest = shifted(torch.tensor([7, -9], dtype=torch.int32), 2)
    >>> high, rest
    (tensor([ 2, -2], dtype=torch.int32), tensor([-1, -1], dtype=torch.int8))
    """
    if by >= 8 * q.element_size() - 2:
        return torch.zeros_like(q), q.clone()
    high = (q + ((1 << by) >> 1)) >> by
    narrow = next(
        dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) if by <= 8 * dtype.itemsize - 1
    )
    return high, (q - (high << by)).to(narrow)


def unshifted(high: Tensor, rest: Tensor, by: int) -> Tensor:
    """The inverse of `shifted`."""
    if by >= 8 * high.element_size() - 2:
        return rest.clone()
    return (high << by) + rest.to(high.dtype)


class PassRange:
    """The range of one pass, and the largest values it has seen.

    Args:
        x0: the input.
        fixed: the fixed point to begin with.
        rows: one for the start and one for each step.
        known: whether earlier passes have shown that it is right. If not, there is a look after every step.
        given: whether it was asked for by the user; then it is not widened.
        overflow: "raise" where a value is not finite (or, if `given`, out of range), "nan": let the output be NaN.
    """

    def __init__(self, x0: Tensor, fixed: FixedPoint, rows: int, *, known: bool, given: bool, overflow: str) -> None:
        self.dtype = x0.dtype
        self.given = given
        self.hold(fixed)
        self.raises = overflow == "raise"
        has_values = type(x0) in (Tensor, Parameter) and not x0.is_meta
        self.looks = has_values and (x0.device.type == "cpu" or not (known or given)) and not capturing(x0)
        # rows 16 bytes apart: aligned as kernels like it
        self.table = torch.zeros(rows, 4, dtype=fixed.work, device=x0.device)[:, :2]
        self.rows = self.table.unbind()
        self.x = 0.0
        self.v = 0.0
        self.start = 0.0
        self.broken = False

    def again(self, x0: Tensor, fixed: FixedPoint) -> PassRange:
        """For another pass like this one, beginning with this fixed point."""
        return PassRange(x0, fixed, len(self.rows), known=True, given=self.given, overflow="nan")

    def hold(self, fixed: FixedPoint) -> None:
        """Use this fixed point from now on. `limits` are of |v| and |x|, as integers; x must fit its float, too."""
        self.fixed = fixed
        largest = torch.finfo(self.dtype).max * 2.0**fixed.bits if fixed.bits < 900 else fixed.limit
        self.limits = fixed.limit, min(fixed.limit, largest)

    def fits(self, row: int) -> bool:
        """Whether the values of this row are in range, as far as that is looked at now."""
        if not self.looks:
            return True
        v, x = self.rows[row].tolist()
        limit_v, limit_x = self.limits
        if not (v <= limit_v and x <= limit_x):
            return False
        self.x = max(self.x, x * 2.0**-self.fixed.bits)
        self.v = max(self.v, v * 2.0 ** -(self.fixed.bits + self.fixed.guard))
        if row == 0:
            self.start = x
        return True

    def widened(self, x: float, v: float) -> FixedPoint:
        """A fixed point that holds |x| and |v| up to these, no finer than the one in use."""
        now = self.fixed
        ideal = calibrated(x, v, now.dtype, now.guard)
        bits = min(now.bits, ideal.bits)
        guard = min(now.bits + now.guard, ideal.bits + ideal.guard) - bits
        return FixedPoint(bits, now.dtype, max(guard, 0))

    def refuse(self, row: int) -> None:
        """Raise because of the values of this row; or, if that was asked for, let the output be NaN."""
        self.broken = True
        if self.raises:
            check_range([self.rows[row].tolist()], self.fixed, self.limits, row)

    def or_nan(self, result: Tensor) -> Tensor:
        """The result; NaN where a value was out of range or not finite and nothing was raised."""
        if self.looks and self.raises:
            return result
        if self.looks:
            return result * float("nan") if self.broken else result
        limit_v, limit_x = self.limits
        v, x = self.table.unbind(1)
        good = (v <= limit_v).all() & (x <= limit_x).all()
        return result * torch.where(good, 1.0, float("nan")).to(result.dtype)


def check_range(table: list[list[float]], fixed: FixedPoint, limits: tuple[float, float], first: int = 0) -> None:
    """Raise if a row (largest |v| and |x| after each step; row 0: the start) is out of range or not finite."""
    for row, (v, x) in enumerate(table, start=first):
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
            f"|{'vx'[which]}| = {value * 2.0**-bits:.4g} {source} is beyond {limits[which] * 2.0**-bits:.4g}, the range of this pass "
            f"({fixed.bits} fraction bits). With fixed_point='auto' the next pass has a wider one; else pass fewer bits, or look for "
            "activations that grow without bound."
        )


class Range:
    """The fixed point that the next pass begins with, by the integers that hold it and by training or evaluation.

    Args:
        setting: "auto"; "int16": 16-bit integers; or the `FixedPoint` to use always.
    """

    def __init__(self, setting: Any = "auto") -> None:
        if setting not in ("auto", "int16") and not isinstance(setting, FixedPoint):
            raise ValueError(
                f"fixed_point must be 'auto', 'int16' or a retrograde.FixedPoint(bits, dtype); got {setting!r}."
            )
        self.setting = setting
        self.narrow = setting == "int16" or (isinstance(setting, FixedPoint) and setting.dtype == torch.int16)
        self.found: dict[tuple[torch.dtype, bool], FixedPoint] = {}
        self.deferred = Deferred()
        self.looked = set[FixedPoint]()  # those in which the channels were looked at

    @property
    def now(self) -> FixedPoint | str:
        """The fixed point in use, or the setting before the first pass."""
        if isinstance(self.setting, FixedPoint):
            return self.setting
        return next(iter(self.found.values()), self.setting)

    def begin(self, x0: Tensor, rows: int, *, training: bool, overflow: str, most_guard: int = MOST_GUARD) -> PassRange:
        """The range of a pass on x0. Raises here what an earlier pass on an accelerator turns out to have met."""
        self.deferred.collect(x0)
        if x0.is_meta and torch.is_grad_enabled():
            raise TypeError(
                "a meta tensor has no values, by which the range of this network could be found. rg.plan predicts memory without "
                "them, under torch.no_grad() there is an output without them; else move the model and its input to a device."
            )
        if self.narrow and x0.dtype == torch.float64:
            raise ValueError("16-bit integers cannot hold a float64 network. Use fixed_point='auto'.")
        if isinstance(self.setting, FixedPoint):
            fixed = replace(self.setting, dtype=integer_dtype(x0.dtype, self.narrow))
            return self._looked_at(x0, PassRange(x0, fixed, rows, known=True, given=True, overflow=overflow))
        dtype = integer_dtype(x0.dtype, self.narrow)
        known = self._known(dtype, training)
        if x0.is_meta or type(x0) not in (Tensor, Parameter):
            peak = 0.0
        elif known is not None and x0.device.type != "cpu":
            return PassRange(x0, known, rows, known=True, given=False, overflow=overflow)
        else:
            if capturing(x0):
                raise RuntimeError(FIRST_STEP)
            peak = float(x0.detach().abs().amax()) if x0.numel() else 0.0
        fixed = known or self._first(peak, dtype, most_guard)
        if math.isfinite(peak) and peak * 2.0**fixed.bits > fixed.limit / 4:
            fixed = self._first(peak, dtype, most_guard)
        return self._looked_at(
            x0, PassRange(x0, fixed, rows, known=known is not None, given=False, overflow=overflow)
        )

    def _looked_at(self, x0: Tensor, seen: PassRange) -> PassRange:
        """The range of a pass, after a look at how it holds the channels of the input, where the fixed point is new."""
        if seen.looks and seen.fixed not in self.looked:
            self.looked.add(seen.fixed)
            _check_channels(x0, seen.fixed, seen.given)
        return seen

    def _first(self, peak: float, dtype: torch.dtype, most_guard: int) -> FixedPoint:
        """For a pass of which only the input is known: v is taken to be an eighth of it, as in most networks."""
        peak = peak if math.isfinite(peak) else 1.0
        return calibrated(peak, peak / 8, dtype, most_guard)

    def _known(self, dtype: torch.dtype, training: bool) -> FixedPoint | None:
        trained = self.found.get((dtype, True))
        if training:
            return trained
        own = self.found.get((dtype, False), trained)
        if own is None or trained is None:
            return own
        return wider(own, trained, 0 if dtype == torch.int16 else YIELDED)

    def learn(self, seen: PassRange, training: bool, most_guard: int = MOST_GUARD) -> None:
        """Take note of the largest values of a finished pass."""
        if (seen.given and seen.looks) or seen.broken:
            return
        if seen.looks:
            self._note(seen.fixed, seen.x, seen.v, seen.start, training, most_guard)
        elif type(seen.table) is Tensor and not seen.table.is_meta:
            outcome = (seen.fixed, seen.limits, seen.raises, seen.given)
            self.deferred.tell(seen.table, partial(self._judge, outcome, training, most_guard))

    def _judge(self, outcome: Outcome, training: bool, most_guard: int, table: Tensor, when: str) -> None:
        """`learn` of a pass on an accelerator, once its values have arrived."""
        fixed, limits, raises, given = outcome
        rows = table.tolist()
        if not all(v <= limits[0] and x <= limits[1] for v, x in rows):
            self.found.pop((fixed.dtype, training), None)  # the next pass looks again
            if raises:
                check_range(rows, fixed, limits)
        elif not given:
            v, x = (max(column) for column in zip(*rows, strict=True))
            self._note(
                fixed, x * 2.0**-fixed.bits, v * 2.0 ** -(fixed.bits + fixed.guard), rows[0][1], training, most_guard
            )

    def _note(self, used: FixedPoint, x: float, v: float, start: float, training: bool, most_guard: int) -> None:
        _check_resolution(x, calibrated(x, v, used.dtype, most_guard))
        fixed = followed(used, x, v, most_guard)
        self.found[used.dtype, training] = fixed
        digits = max(math.frexp(start)[1], 0)
        if start and digits < _FEW[fixed.dtype]:
            warnings.warn(
                f"the input of this pass was held to {digits} binary digits, because activations of it, or of a pass before "
                "it, are larger out of all proportion. Scale the input up, or normalise what makes them grow.",
                stacklevel=2,
            )


def holders(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parts of a network that keep their state in fixed point, by name; each has a `range`."""
    for name, module in net.named_modules():
        hidden = module.__dict__.get("momentum")  # a MomentumStage keeps its network out of the module tree
        for part in (module, hidden):
            if isinstance(getattr(part, "range", None), Range):
                yield name, part


def _headroom(dtype: torch.dtype) -> int:
    return HEADROOM - (dtype == torch.int16)


def _check_resolution(peak: float, fixed: FixedPoint) -> None:
    """Raise where even the largest |x| is so small that the finest fixed point holds it less precisely than its float would."""
    digits = math.frexp(peak)[1] + fixed.bits
    if peak and fixed.bits == MOST_BITS and digits < 6 * fixed.dtype.itemsize:
        raise RangeOverflow(
            f"|x| is {peak:.3g} at most: with the {MOST_BITS} fraction bits that there are, that is held to {max(digits, 0)} binary "
            "digits. Multiply the input by a constant, or normalise it."
        )


def _check_channels(x0: Tensor, fixed: FixedPoint, given: bool) -> None:
    """Warn where small channels of the input have few digits, because others are large or the fixed point was given so."""
    for dim in sorted({1, x0.dim() - 1}) if x0.dim() > 1 and x0.numel() else ():
        others = [k for k in range(x0.dim()) if k != dim]
        sizes = x0.detach().to(fixed.work).square().mean(others).sqrt().sort().values
        sizes = sizes[sizes > 0]
        if not len(sizes):
            continue
        small, large = (float(sizes[k]) for k in (len(sizes) // 10, -1))
        digits, most = (math.log2(size) + fixed.bits + fixed.guard for size in (small, large))
        if digits < _FEW_OF_CHANNELS[fixed.dtype] and (given or most - digits > _RATIO_OF_CHANNELS):
            off = 100 * min(4 * 2.0**-digits, 1)
            warnings.warn(
                f"channels of x (dimension {dim}) are {small:.2g} in size, beside others of {large:.2g}: with {fixed.bits} fraction "
                f"bits and {fixed.guard} guard bits they are held to {max(int(digits), 0)} binary digits, and their gradients are off "
                f"by about {off:.2g} %. Bring the channels to one scale, give more fraction bits, or take wider integers (float64, "
                "or without 'int16').",
                stacklevel=2,
            )
            return
