"""Fixed point: a float x is held as the integer round(x·2^bits).

    encode   q = round(x·2^bits)          decode   x = q·2^−bits

Additions of such integers lose nothing, so they can be undone. 32-bit integers serve floats up to float32, 64-bit ones
float64; 16-bit ones, half as many bytes to hold and to move, are for networks that compute in bfloat16 or float16.
Magnitudes are kept at or below `limit`, one bit short of the dtype's own range: the sum of two values in range cannot wrap,
so a value out of range is always seen. v is mostly much smaller than x: it has `guard` digits more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class FixedPoint:
    """How floats of one network are held as integers."""

    bits: int
    dtype: torch.dtype  # of the integers: torch.int16, torch.int32 or torch.int64
    guard: int = 0  # further bits of v

    @cached_property
    def limit(self) -> float:
        """The largest magnitude allowed, as an integer."""
        return 2.0 ** (8 * self.dtype.itemsize - 2)

    @cached_property
    def unit(self) -> float:
        """What the integer 1 stands for."""
        return 2.0**-self.bits

    @cached_property
    def guarded_unit(self) -> float:
        """The same of v."""
        return 2.0 ** -(self.bits + self.guard)

    @cached_property
    def work(self) -> torch.dtype:
        """The float dtype in which values are scaled and gradients are added up."""
        return torch.float64 if self.dtype == torch.int64 else torch.float32

    def encode(self, x: Tensor, guard: int = 0) -> Tensor:
        return torch.round(x.to(self.work) * 2.0 ** (self.bits + guard)).to(self.dtype)

    def decode(self, q: Tensor, dtype: torch.dtype, guard: int = 0) -> Tensor:
        return (q.to(self.work) * 2.0 ** -(self.bits + guard)).to(dtype)


INTEGERS = {torch.float64: torch.int64}
"""By the dtype of floats: the integers that hold them, where 32 bits do not."""


def integer_dtype(dtype: torch.dtype, narrow: bool = False) -> torch.dtype:
    """The integers that hold floats of `dtype`; `narrow`: 16 bits wide."""
    return INTEGERS.get(dtype, torch.int16 if narrow else torch.int32)
