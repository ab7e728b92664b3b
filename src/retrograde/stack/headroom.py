"""How fine a fixed point a network is given: as fine as its largest values allow, with a few bits to spare."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch

from ..core.errors import RangeOverflow
from ..core.fixedpoint import FixedPoint

HEADROOM = 3
"""Bits kept free above the largest value seen when the range is calibrated; one less of 16, which have none to waste."""
MOST_GUARD = 6
"""Guard digits at most, whatever v was: branches that start at zero grow quickly, and v must be able to reach |x| / 8."""

YIELD = 6
"""Bits that evaluation gives up, at most, to hold what training has to: in 32 there are as many as float32 has, and these to spare."""

MOST_BITS = 107
"""Fraction bits at most: 2^bits, and as much again for the guard digits, are float32 numbers."""

_FEW = {torch.int16: 3, torch.int32: 11, torch.int64: 24}
"""Binary digits of the largest |x₀| below which a pass is said to be coarse, by the integers that hold it. In 32: what TF32 has."""


def headroom(dtype: torch.dtype) -> int:
    """Bits to keep free in integers of this dtype."""
    return HEADROOM - (dtype == torch.int16)


def calibrated(peak_x: float, peak_v: float, dtype: torch.dtype, most_guard: int = MOST_GUARD) -> FixedPoint:
    """The finest fixed point that holds |x| and |v| up to these with `HEADROOM` bits to spare. A peak of 0 says nothing.

    >>> calibrated(5.0, 0.2, torch.int32)
    FixedPoint(bits=24, dtype=torch.int32, guard=5)
    """
    capacity = 8 * dtype.itemsize - 2 - headroom(dtype)
    peak_x = peak_x or peak_v or 1.0
    # peak < 2^exponent
    bits_x, bits_v = (min(capacity - math.frexp(peak)[1], MOST_BITS) for peak in (peak_x, peak_v or peak_x))
    bits = min(bits_x, bits_v)
    return FixedPoint(bits, dtype, min(bits_v - bits, most_guard))


def toward(own: FixedPoint, other: FixedPoint) -> FixedPoint:
    """A fixed point wide enough for x and v of the other as well, or as far as costs `YIELD` bits: none of 16."""
    most, guard = 0 if own.dtype == torch.int16 else YIELD, max(own.guard, other.guard)
    bits, v = (
        max(min(a, b), a - most) for a, b in ((own.bits, other.bits), (own.bits + own.guard, other.bits + other.guard))
    )
    return replace(own, bits=bits, guard=min(max(v - bits, 0), guard))


def check_resolution(peak: float, fixed: FixedPoint) -> None:
    """Raise where even the largest |x| is so small that the finest fixed point holds it less precisely than its float would (a
    float64: to fewer than 48 digits)."""
    digits = math.frexp(peak)[1] + fixed.bits
    if peak and fixed.bits == MOST_BITS and digits < 6 * fixed.dtype.itemsize:
        raise RangeOverflow(
            f"|x| is {peak:.3g} at most: with the {MOST_BITS} fraction bits that there are, that is held to {max(digits, 0)} binary "
            "digits. Multiply the input by a constant, or normalise it."
        )


def follow(fixed: FixedPoint, peak_x: float, peak_v: float, most_guard: int = MOST_GUARD) -> FixedPoint:
    """The fixed point for the next step, given the largest values of this one.

    It is left alone while 1 to 2·HEADROOM + 1 bits are free (1 to 3 of 16), so that it moves rarely; a range that is nearly
    used up is widened before it overflows, and one far too wide is narrowed for precision. Raises where there is none fine enough.
    """
    ideal = calibrated(peak_x, peak_v, fixed.dtype, most_guard)
    check_resolution(peak_x, ideal)
    moves = (fixed.bits - ideal.bits, fixed.bits + fixed.guard - ideal.bits - ideal.guard)
    free = headroom(fixed.dtype)
    widest = 1 if fixed.dtype == torch.int16 else free + 1
    return fixed if all(-widest <= move < free for move in moves) else ideal


def warn_of_few_digits(start: float, fixed: FixedPoint) -> None:
    """Where the input of a pass was held to few binary digits because its range was made for far larger values. That need not
    matter: what blocks make of it may not depend on them.

    Args:
        start: the largest |x₀|, in units of the fixed point.
    """
    digits = max(math.frexp(start)[1], 0)
    if start and digits < _FEW[fixed.dtype]:
        warnings.warn(
            f"the input of this pass was held to {digits} binary digits, because activations of it, or of a pass before it, are larger "
            "out of all proportion. Scale the input up, or normalise what makes them grow; after a single such batch the next pass is "
            "held finer.",
            stacklevel=2,
        )
