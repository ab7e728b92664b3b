"""Fixed point: a float x is held as the integer round(x·2^bits).

    encode   q = round(x·2^bits)          decode   x = q·2^−bits

Additions of such integers lose nothing, so they can be undone. 32-bit integers serve every float dtype up to float32, 64-bit
integers serve float64. Magnitudes are kept at or below `limit`, one bit short of the dtype's own range: the sum of two
values in range cannot wrap, so a value out of range is always seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEADROOM = 3
"""Bits kept free above the largest value seen when the range is calibrated."""


@dataclass(frozen=True)
class FixedPoint:
    """How floats of one network are held as integers."""

    bits: int
    dtype: torch.dtype  # of the integers: torch.int32 or torch.int64

    @property
    def limit(self) -> float:
        """The largest magnitude allowed, as an integer."""
        return 2.0**30 if self.dtype == torch.int32 else 2.0**62

    @property
    def largest(self) -> float:
        """The same as a float of the network."""
        return self.limit * 2.0**-self.bits

    @property
    def work(self) -> torch.dtype:
        """The float dtype in which values are scaled and gradients are carried."""
        return torch.float32 if self.dtype == torch.int32 else torch.float64

    def encode(self, x: Tensor) -> Tensor:
        return torch.round(x.to(self.work) * 2.0**self.bits).to(self.dtype)

    def decode(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        return (q.to(self.work) * 2.0**-self.bits).to(dtype)


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integers that hold floats of `dtype`."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def calibrated(peak: float, dtype: torch.dtype) -> FixedPoint:
    """The finest fixed point that holds values up to `peak` with `HEADROOM` bits to spare.

    >>> calibrated(5.0, torch.int32).bits
    24
    """
    exponent = max(math.frexp(peak)[1], -64)  # peak < 2^exponent; the floor keeps 2^bits a float32
    return FixedPoint((30 if dtype == torch.int32 else 62) - HEADROOM - exponent, dtype)


def follow(fixed: FixedPoint, peak: float) -> FixedPoint:
    """The fixed point for the next step, given the largest value of this one.

    It is left alone while 1 to 2·HEADROOM + 1 bits are free, so that it moves rarely; a range that is nearly used up is
    widened before it overflows, and one far too wide is narrowed for precision.
    """
    free = math.log2(fixed.largest / peak) if peak > 0 else math.inf
    return fixed if 1 <= free <= 2 * HEADROOM + 1 else calibrated(peak, fixed.dtype)
