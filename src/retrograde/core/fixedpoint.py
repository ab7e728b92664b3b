"""Fixed point: a float x is held as the integer round(x·2^bits).

    encode   q = round(x·2^bits)          decode   x = q·2^−bits

Additions of such integers lose nothing, so they can be undone. 32-bit integers serve every float dtype up to float32, 64-bit
integers serve float64. Magnitudes are kept at or below `limit`, one bit short of the dtype's own range: the sum of two
values in range cannot wrap, so a value out of range is always seen. The velocity is mostly much smaller than x: it has
`guard` digits more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEADROOM = 3
"""Bits kept free above the largest value seen when the range is calibrated."""
MOST_GUARD = 6
"""Guard digits at most, whatever v was: branches that start at zero grow quickly, and v must be able to reach |x| / 8."""


@dataclass(frozen=True)
class FixedPoint:
    """How floats of one network are held as integers."""

    bits: int
    dtype: torch.dtype  # of the integers: torch.int32 or torch.int64
    guard: int = 0  # further bits of v

    @property
    def limit(self) -> float:
        """The largest magnitude allowed, as an integer."""
        return 2.0**30 if self.dtype == torch.int32 else 2.0**62

    @property
    def work(self) -> torch.dtype:
        """The float dtype in which values are scaled and gradients are carried."""
        return torch.float32 if self.dtype == torch.int32 else torch.float64

    def encode(self, x: Tensor, guard: int = 0) -> Tensor:
        return torch.round(x.to(self.work) * 2.0 ** (self.bits + guard)).to(self.dtype)

    def decode(self, q: Tensor, dtype: torch.dtype, guard: int = 0) -> Tensor:
        return (q.to(self.work) * 2.0 ** -(self.bits + guard)).to(dtype)


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integers that hold floats of `dtype`."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def calibrated(peak_x: float, peak_v: float, dtype: torch.dtype, most_guard: int = MOST_GUARD) -> FixedPoint:
    """The finest fixed point that holds |x| and |v| up to these with `HEADROOM` bits to spare. A peak of 0 says nothing.

    >>> calibrated(5.0, 0.2, torch.int32)
    FixedPoint(bits=24, dtype=torch.int32, guard=5)
    """
    capacity = (30 if dtype == torch.int32 else 62) - HEADROOM
    peak_x = peak_x or peak_v or 1.0
    # peak < 2^exponent; the floor keeps 2^bits a float32
    bits_x, bits_v = (capacity - max(math.frexp(peak)[1], -48) for peak in (peak_x, peak_v or peak_x))
    bits = min(bits_x, bits_v)
    return FixedPoint(bits, dtype, min(bits_v - bits, most_guard))


def follow(fixed: FixedPoint, peak_x: float, peak_v: float, most_guard: int = MOST_GUARD) -> FixedPoint:
    """The fixed point for the next step, given the largest values of this one.

    It is left alone while 1 to 2·HEADROOM + 1 bits are free, so that it moves rarely; a range that is nearly used up is
    widened before it overflows, and one far too wide is narrowed for precision.
    """
    ideal = calibrated(peak_x, peak_v, fixed.dtype, most_guard)
    moves = (fixed.bits - ideal.bits, fixed.bits + fixed.guard - ideal.bits - ideal.guard)
    return fixed if all(-HEADROOM - 1 <= move < HEADROOM for move in moves) else ideal
