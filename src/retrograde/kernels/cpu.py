"""CPU bodies: vector arithmetic on pieces that stay in cache.

CPUs have vector instructions for 32-bit products and for float64, but none for integer division, and the values fit:
|v| < 2^31 and n, d < 2^19, so every product is below 2^50 and exact in float64. The floor of a quotient of such integers is

    floor((a + ½)·(1/b))

(a + ½)/b is at least ½/b away from any integer, and the computed value is off by less than 2^−51·|a|/b < ½/b, so the
floor is exact. Working through the tensors piece by piece keeps the temporaries in cache and small (2 MB a thread, whatever
the size of the state). 64-bit and 16-bit state goes through the plain-torch bodies, piece by piece.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..core import ops as plain
from . import native
from .layout import alike, laid_out_as

PIECE = 1 << 16
"""Elements worked on at a time: the temporaries of a piece fit the cache, and torch uses all its threads on it."""


def _pieces(x: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Matching flat pieces of the state x and of tensors of its shape."""
    count = -(-x.numel() // PIECE)
    return zip(*([None] * count if t is None else _flat(t, x).split(PIECE) for t in (x, *others)), strict=True)


def _bits(x: Tensor, mask: Tensor | None) -> Iterable[Tensor | None]:
    """The bytes of a mask that go with the pieces of x."""
    return [None] * -(-x.numel() // PIECE) if mask is None else mask.split(PIECE // 8)


def _flat(t: Tensor, like: Tensor) -> Tensor:
    """t as one run of memory in the element order of `like`; a copy if it is laid out otherwise."""
    return laid_out_as(like, t).as_strided((t.numel(),), (1,))


class _Scratch(threading.local):
    """Temporaries of one piece. They are kept: fresh memory is paid for page by page, more than the arithmetic costs."""

    @torch.inference_mode(False)
    def __init__(self) -> None:
        self.u, self.rest, self.q = (torch.empty(PIECE, dtype=torch.int32) for _ in range(3))
        self.a, self.b = (torch.empty(PIECE, dtype=torch.float64) for _ in range(2))
        self.step = torch.empty(PIECE, dtype=torch.float32)


_scratch = _Scratch()


def _multiply_(v: Tensor, i: Tensor, n: int, d: int) -> None:
    """`core.multiply` in place, as v ← v + floor((u − (d − n)·v) / d), so that most of it is 32-bit."""
    size = v.numel()
    u, rest, q = _scratch.u[:size], _scratch.rest[:size], _scratch.q[:size]
    a, b = _scratch.a[:size], _scratch.b[:size]
    u.copy_(i)
    if i.dtype == torch.int32:
        rest.copy_(_floor_quotient_(a.copy_(i), n))
    else:  # below 2^15: a multiplication and a shift are exact, and stay below 2^31
        shift = 15 + n.bit_length()
        torch.mul(u, (1 << shift) // n + 1, out=rest).bitwise_right_shift_(shift)
    u.sub_(rest, alpha=n)
    if abs(d - n) == 1:
        a.copy_(u.sub_(v, alpha=d - n))
    else:
        a.copy_(v).mul_(n - d).add_(b.copy_(u))
        u.sub_(v, alpha=d - n)  # may wrap; only the remainder mod d is taken from it
    q.copy_(_floor_quotient_(a, d))
    v.add_(q)
    i.copy_(u.sub_(q, alpha=d).add_(rest, alpha=d))


def _floor_quotient_(a: Tensor, b: int) -> Tensor:
    return torch.add(_half(b), a, alpha=1.0 / b, out=a).floor_()


@functools.cache
@torch.inference_mode(False)
def _half(b: int) -> Tensor:
    return torch.tensor(0.5 / b, dtype=torch.float64)


def _increment(
    x: Tensor, y: Tensor, seen: torch.dtype, scale: float, unit: float, form: int, mask: Tensor | None = None
) -> Tensor:
    if form:
        return plain.increment(x, y, seen, scale, unit, form, mask)
    step = _scratch.step[: y.numel()]
    return (torch.mul(y, scale, out=step) if y.dtype == torch.float32 else step.copy_(y).mul_(scale)).round_()


def _decode(x: Tensor, unit: float, out: Tensor) -> None:
    if out.dtype == torch.float32:
        out.copy_(x).mul_(unit)
    else:
        out.copy_(x.float().mul_(unit))


def _native(
    what: int, x: Tensor, v: Tensor, i: Tensor | None, y: Tensor | None, out: Tensor | None, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, watch: Tensor | None = None,
    mask: Tensor | None = None,
) -> native.Job | None:  # fmt: skip
    """The whole step in compiled code; None where there is none for it."""
    run = native.load()
    if run is None or (form and seen != torch.float32):
        return None
    if form == 2 and y is not None and y.dtype.itemsize < 4:  # what the sum is rounded to
        return None
    given = y if y is None or (y.dtype == torch.float32 and y.stride() == x.stride()) else laid_out_as(x, y).float()
    result = out if out is None or out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    size, threads = x.numel(), torch.get_num_threads()
    job = native.Job(
        x.data_ptr(), v.data_ptr(), None if i is None else i.data_ptr(), None if given is None else given.data_ptr(),
        None if result is None else result.data_ptr(), size, 0 if i is None else i.element_size(), n, d, guard, scale, unit,
        form, what, None if watch is None else watch.data_ptr(), 0, None if mask is None else mask.data_ptr(),
    )  # fmt: skip
    run(ctypes.addressof(job), threads if threads == 1 else min(threads, 1 + size // PIECE))
    if out is not None and result is not None and result is not out:
        out.copy_(result)
    return job


def advance_(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None = None,
) -> None:  # fmt: skip
    if not alike(x, v, i, out):
        plain.advance_(x, v, i, y, seen, n, d, scale, unit, form, guard, out, watch, mask)
        return
    if x.dtype != torch.int32:
        seen_here = torch.zeros_like(watch)
        watch.zero_()
        for (x_, v_, i_, y_, out_), mask_ in zip(_pieces(x, v, i, y, out), _bits(x, mask), strict=True):
            plain.advance_(x_, v_, i_, y_, seen, n, d, scale, unit, form, guard, out_, seen_here, mask_)
            torch.maximum(watch, seen_here, out=watch)
        return
    job = _native(native.ADVANCE, x, v, i, y, out, seen, n, d, scale, unit, form, guard, watch, mask)
    if job is not None:
        if job.bad:
            watch[0] = plain.increment(x - plain.rounded(v, guard), y, seen, scale, unit, form).abs().amax()
        return
    peaks = []
    for (x_, v_, i_, y_, out_), mask_ in zip(_pieces(x, v, i, y, out), _bits(x, mask), strict=True):
        step = _increment(x_, y_, seen, scale, unit, form, mask_)
        if n == 0:
            v_.zero_()
        elif n != d:
            _multiply_(v_, i_, n, d)
        v_.add_(_scratch.q[: v_.numel()].copy_(step))
        x_.add_(plain.rounded(v_, guard))
        _decode(x_, unit, out_)
        peaks.append([float(t) for pair in map(torch.aminmax, (step, v_, x_)) for t in pair])
    step_, v_, x_ = torch.tensor(peaks, dtype=torch.float64).abs().view(-1, 3, 2).amax((0, 2))
    watch[0], watch[1] = v_ if step_ <= 2.0**30 else step_, x_


def pull_(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    if x.dtype != torch.int32 or not alike(x, v, out):
        plain.pull_(x, v, unit, guard, out)
        return
    if _native(native.PULL, x, v, None, None, out, out.dtype, 1, 1, 1.0, unit, 0, guard) is not None:
        return
    for x_, v_, out_ in _pieces(x, v, out):
        _decode(x_.sub_(plain.rounded(v_, guard)), unit, out_)


def retreat_(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None,
) -> None:  # fmt: skip
    if not alike(x, v, i, out):
        plain.retreat_(x, v, i, y, seen, n, d, scale, unit, form, guard, out)
        return
    if x.dtype != torch.int32:
        for x_, v_, i_, y_, out_ in _pieces(x, v, i, y, out):
            plain.retreat_(x_, v_, i_, y_, seen, n, d, scale, unit, form, guard, out_)
        return
    if _native(native.RETREAT, x, v, i, y, out, seen, n, d, scale, unit, form, guard) is not None:
        return
    for x_, v_, i_, y_, out_ in _pieces(x, v, i, y, out):
        v_.sub_(_scratch.q[: v_.numel()].copy_(_increment(x_, y_, seen, scale, unit, form)))
        if n != d:
            _multiply_(v_, i_, d, n)
        if out_ is not None:
            _decode(x_.sub_(plain.rounded(v_, guard)), unit, out_)


def carry(
    p: Tensor | None, h: Tensor | None, d: Tensor, factors: tuple[float, float, float, float, int],
    out: Tensor | None, gy: Tensor, cast: Tensor, mask: Tensor | None = None, after: Tensor | None = None,
) -> bool:  # fmt: skip
    """`stack.graph.carry`, if there is compiled code for it; whether there was."""
    run = native.load_carry()
    if run is None or (mask is None and cast is not gy) or not alike(gy, p, h, d, out, cast):
        return False
    if any(t is not None and t.dtype != torch.float32 for t in (p, h, d, gy, cast)):
        return False
    threads, size = torch.get_num_threads(), gy.numel()
    threads = threads if threads == 1 else min(threads, 1 + size // PIECE)
    at = [None if t is None else t.data_ptr() for t in (p, h, d, out, gy, cast, mask, after)]
    run(*at, size, *factors, threads)
    return True


def digest(t: Tensor, into: Tensor, seed: int, sign: int) -> bool:
    """`core.verify.digest` of a contiguous tensor, if there is compiled code for it; whether there was."""
    run = native.load_digest()
    if run is None:
        return False
    threads = torch.get_num_threads()
    threads = threads if threads == 1 else min(threads, 1 + t.nbytes // (4 * PIECE))
    run(t.data_ptr(), t.nbytes, seed, sign, into.data_ptr(), threads)
    return True
