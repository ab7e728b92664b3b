"""The kernels on a CPU: compiled C (`cpu.c`) for 32-bit state, one pass over memory for each step.

Where there is no C compiler, and for 64-bit and 16-bit state, the reference bodies run piece by piece, so that their temporaries stay
small and in cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .kernels import alike, laid_out_as
from .reference import Factors, decode, encode

__all__ = ["advance", "carry", "decode", "digest", "encode", "pull", "retreat"]
PIECE = 1 << 16
"""Elements worked on at a time: the temporaries of a piece fit the cache, and torch uses all its threads on it."""


def advance(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None = None,
    before: Tensor | None = None, over: int = 0,
) -> None:  # fmt: skip
    if not alike(x, v, i, out, before):
        reference.advance(x, v, i, y, seen, n, d, scale, unit, form, guard, out, watch, mask, before, over)
        return
    job = _compiled(native.ADVANCE, x, v, i, y, out, seen, n, d, scale, unit, form, guard, watch, mask, before, over)
    if job is None:
        of_piece = torch.zeros_like(watch)
        watch.zero_()
        for x_, v_, i_, y_, out_, mask_, before_ in pieces(x, v, i, y, out, mask, before):
            reference.advance(
                x_, v_, i_, y_, seen, n, d, scale, unit, form, guard, out_, of_piece, mask_, before_, over
            )
            torch.maximum(watch, of_piece, out=watch)
    elif job.bad:
        x0 = x - reference.rounded(v, guard)
        watch[0] = reference.increment(x0, y, seen, scale, unit, form).abs().amax()


def pull(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    if not alike(x, v, out):
        reference.pull(x, v, unit, guard, out)
    elif _compiled(native.PULL, x, v, None, None, out, out.dtype, 1, 1, 1.0, unit, 0, guard) is None:
        for x_, v_, out_ in pieces(x, v, out):
            reference.pull(x_, v_, unit, guard, out_)


def retreat(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None,
    before: Tensor | None = None, over: int = 0,
) -> None:  # fmt: skip
    if not alike(x, v, i, out, before):
        reference.retreat(x, v, i, y, seen, n, d, scale, unit, form, guard, out, before, over)
    elif (
        _compiled(native.RETREAT, x, v, i, y, out, seen, n, d, scale, unit, form, guard, None, None, before, over)
        is None
    ):
        for x_, v_, i_, y_, out_, before_ in pieces(x, v, i, y, out, before):
            reference.retreat(x_, v_, i_, y_, seen, n, d, scale, unit, form, guard, out_, before_, over)


def carry(
    p: Tensor | None, h: Tensor | None, d: Tensor, factors: Factors,
    out: Tensor | None, gy: Tensor, cast: Tensor, mask: Tensor | None = None, after: Tensor | None = None,
) -> None:  # fmt: skip
    if not alike(gy, out, cast):
        reference.carry(p, h, d, factors, out, gy, cast, mask, after)
        return
    given = [None if t is None else laid_out_as(gy, t) for t in (p, h, d)]
    run = native.function("carry")
    plain = all(t is None or t.dtype == torch.float32 for t in (p, h, d, gy, cast))
    if run is None or not plain or (mask is None and cast is not gy):
        for gy_, p_, h_, d_, out_, cast_, mask_, after_ in pieces(gy, *given, out, cast, mask, after):
            reference.carry(p_, h_, d_, factors, out_, gy_, gy_ if cast is gy else cast_, mask_, after_)
        return
    addresses = [None if t is None else t.data_ptr() for t in (*given, out, gy, cast, mask, after)]
    run(*addresses, gy.numel(), *factors, _threads(gy.numel()))


def digest(words: Tensor, into: Tensor, seed: int, sign: int) -> None:
    run = native.function("digest")
    if run is None:
        reference.digest(words, into, seed, sign)
        return
    run(words.data_ptr(), words.nbytes, seed, sign, into.data_ptr(), _threads(words.numel()))


def _compiled(
    what: int, x: Tensor, v: Tensor, i: Tensor | None, y: Tensor | None, out: Tensor | None, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, watch: Tensor | None = None, mask: Tensor | None = None,
    before: Tensor | None = None, over: int = 0,
) -> native.Job | None:  # fmt: skip
    """The whole step in compiled code; None where there is none for it."""
    run = native.function("run")
    if run is None or x.dtype != torch.int32 or (form and seen != torch.float32):
        return None
    if form == 2 and y is not None and y.dtype.itemsize < 4:  # the sum is rounded to y's dtype
        return None
    as_given = y is None or (y.dtype == torch.float32 and y.stride() == x.stride())
    given = y if y is None or as_given else laid_out_as(x, y).float()
    result = out if out is None or out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    addresses = [None if t is None else t.data_ptr() for t in (x, v, i, given, result)]
    width = 0 if i is None else i.element_size()
    job = native.Job(
        *addresses, x.numel(), width, n, d, guard, scale, unit, form, what,
        None if watch is None else watch.data_ptr(), 0, None if mask is None else mask.data_ptr(),
        None if before is None else before.data_ptr(), over,
    )  # fmt: skip
    run(ctypes.addressof(job), _threads(x.numel()))
    if out is not None and result is not None and result is not out:
        out.copy_(result)
    return job


def _threads(size: int) -> int:
    threads = torch.get_num_threads()
    return threads if threads == 1 else min(threads, 1 + size // PIECE)


def pieces(x: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Matching flat pieces of the state x and of tensors of its shape (a mask has an eighth of its elements)."""
    for start in range(0, x.numel(), PIECE):
        yield tuple(None if t is None else _piece(t, x, start) for t in (x, *others))


def _piece(t: Tensor, x: Tensor, start: int) -> Tensor:
    if t.dtype == torch.uint8 and t.shape != x.shape:
        return t[start // 8 : (start + PIECE) // 8]
    t = laid_out_as(x, t)  # a copy, where it is laid out otherwise: of y alone
    return t.as_strided((min(PIECE, t.numel() - start),), (1,), t.storage_offset() + start)
