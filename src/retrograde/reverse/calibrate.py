"""Which fixed point holds which values: the finest that leaves some bits free, and what is said of one that is too coarse."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from ..errors import RangeOverflow

HEADROOM = 3
"""Bits kept free above the largest value seen; one less of 16, which have none to waste."""
MOST_GUARD = 6
"""Guard digits of v at most, whatever v was: branches that start at zero grow quickly."""
MOST_BITS = 107
"""Fraction bits at most: 2^bits, and as much again for the guard digits, are float32 numbers."""
_FEW = {torch.int16: 3, torch.int32: 11, torch.int64: 24}
"""Binary digits of the largest |x₀| below which a pass is said to be coarse. For 32-bit integers: what TF32 has."""

_LOST_OF_CHANNELS = {torch.int16: 2.0**-5, torch.int32: 0.0015, torch.int64: 0.0015}
"""The share of their gradients that a tenth of the channels may lose, held to few binary digits, without a word."""
_LOST_AS_GIVEN = 2.0**-7
"""The same, in a fixed point that the user has given: who asks for few bits gets few."""
_RATIO_OF_CHANNELS = 6
"""Channels that differ by fewer bits in size are not what makes digits few: the whole input is small beside what follows."""


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


def check_start(start: float, fixed: FixedPoint) -> None:
    """Warn where the largest |x₀|, as an integer, is small."""
    digits = max(math.frexp(start)[1], 0)
    if start and digits < _FEW[fixed.dtype]:
        warnings.warn(
            f"the input of this pass was held to {digits} binary digits, because activations of it, or of a pass before "
            "it, are larger out of all proportion. Scale the input up, or normalise what makes them grow.",
            stacklevel=2,
        )


def _headroom(dtype: torch.dtype) -> int:
    return HEADROOM - (dtype == torch.int16)


def check_resolution(peak: float, fixed: FixedPoint) -> None:
    """Raise where even the largest |x| is so small that the finest fixed point holds it less precisely than its float would."""
    digits = math.frexp(peak)[1] + fixed.bits
    if peak and fixed.bits == MOST_BITS and digits < 6 * fixed.dtype.itemsize:
        raise RangeOverflow(
            f"|x| is {peak:.3g} at most: with the {MOST_BITS} fraction bits that there are, that is held to {max(digits, 0)} binary "
            "digits. Multiply the input by a constant, or normalise it."
        )


def check_channels(x0: Tensor, fixed: FixedPoint, given: bool) -> bool:
    """Warn where small channels of the input have few digits, because others are large or the fixed point was given so; whether so."""
    for dim in sorted({1, x0.dim() - 1}) if x0.dim() > 1 and x0.numel() else ():
        others = [k for k in range(x0.dim()) if k != dim]
        sizes = x0.detach().to(fixed.work).square().mean(others).sqrt().sort().values
        sizes = sizes[sizes > 0]
        if not len(sizes):
            continue
        small, large = (float(sizes[k]) for k in (len(sizes) // 10, -1))
        digits, most = (math.log2(size) + fixed.bits + fixed.guard for size in (small, large))
        lost = min(4 * 2.0**-digits, 1)
        least = _LOST_OF_CHANNELS[fixed.dtype]
        if lost >= max(least, _LOST_AS_GIVEN) if given else lost >= least and most - digits > _RATIO_OF_CHANNELS:
            warnings.warn(
                f"channels of x (dimension {dim}) are {small:.2g} in size, beside others of {large:.2g}: with {fixed.bits} fraction "
                f"bits and {fixed.guard} guard bits they are held to {max(int(digits), 0)} binary digits, and their gradients are off "
                f"by about {100 * lost:.2g} %. Bring the channels to one scale, give more fraction bits, or take wider integers "
                "(float64, or without 'int16').",
                stacklevel=2,
            )
            return True
    return False
