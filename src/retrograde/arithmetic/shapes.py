"""The kernels on tensors without values: nothing to compute, and no temporaries to count but those the real kernels make.

On a CPU what is not compiled is run piece by piece (`cpu`), so here the first piece is run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .cpu import pieces
from .kernels import alike, laid_out_as
from .reference import Factors


def advance(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None = None,
    before: Tensor | None = None, over: int = 0,
) -> None:  # fmt: skip
    _step(x, y, out)


def pull(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    _step(x, None, out)


def retreat(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None, *others: Any,
) -> None:  # fmt: skip
    _step(x, y, out)


def encode(x: Tensor, scale: float, unit: float, q: Tensor, out: Tensor | None, *others: Any) -> None:
    if x.device.type == "cpu" or q.dtype == torch.int64:
        (x.to(torch.float64 if q.dtype == torch.int64 else torch.float32) * 1.0).round_()


def decode(q: Tensor, unit: float, out: Tensor) -> None:
    if (q.device.type == "cpu" and out.dtype.itemsize < 4) or q.dtype == torch.int64:
        q.to(out.dtype)


def carry(
    p: Tensor | None, h: Tensor | None, d: Tensor, factors: Factors,
    out: Tensor | None, gy: Tensor, cast: Tensor, mask: Tensor | None = None, after: Tensor | None = None,
) -> None:  # fmt: skip
    if gy.device.type != "cpu":
        return
    if not alike(gy, out, cast):
        reference.carry(p, h, d, factors, out, gy, cast, mask, after)
        return
    given = [None if t is None else laid_out_as(gy, t) for t in (p, h, d)]
    if any(t is not None and t.dtype != torch.float32 for t in (*given, cast)) or (mask is None and cast is not gy):
        gy_, p_, h_, d_, out_, cast_, mask_, after_ = next(pieces(gy, *given, out, cast, mask, after))
        reference.carry(p_, h_, d_, factors, out_, gy_, gy_ if cast is gy else cast_, mask_, after_)


def digest(*arguments: Any) -> None:
    pass


def _step(x: Tensor, y: Tensor | None, out: Tensor | None) -> None:
    """On a CPU the compiled kernels read y, and write `out`, in float32 and in the layout of x."""
    if x.device.type == "cpu" and x.dtype == torch.int32:
        held = [None if t is None or t.dtype == torch.float32 else torch.empty_like(x) for t in (y, out)]
        del held
