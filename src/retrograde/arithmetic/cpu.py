"""The kernels on a CPU: compiled C (`cpu.c`) for state in 16 and 32 bits.

For 64-bit state, and where there is no C compiler, the reference bodies run piece by piece, so that their temporaries stay small and in
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .reference import Kernels

PIECE = 1 << 16
"""Elements worked on at a time: the temporaries of a piece fit the cache, and torch uses all its threads on it."""


def kernels(integers: torch.dtype) -> Kernels:
    """Those for state in these integers."""
    compiled = [f for name in Kernels._fields if (f := native.function(name)) is not None]
    if not compiled or integers == torch.int64:
        digest = compiled[-1] if compiled else reference.digest
        return reference.KERNELS._replace(advance=advance, pull=pull, retreat=retreat, digest=digest)
    return Kernels(*compiled)


def advance(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None,
    before: Tensor | None, over: int,
) -> None:  # fmt: skip
    watch.zero_()
    of_piece = torch.zeros_like(watch)
    for x_, v_, i_, y_, out_, mask_, before_ in _pieces(x, v, i, y, out, mask, before):
        numbers = (n, d, scale, unit, form, guard)
        reference.advance(x_, v_, i_, y_, seen, *numbers, out_, of_piece, mask_, before_, over)
        torch.maximum(watch, of_piece, out=watch)


def pull(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    for x_, v_, out_ in _pieces(x, v, out):
        reference.pull(x_, v_, unit, guard, out_)


def retreat(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None, before: Tensor | None, over: int,
) -> None:  # fmt: skip
    for x_, v_, i_, y_, out_, before_ in _pieces(x, v, i, y, out, before):
        reference.retreat(x_, v_, i_, y_, seen, n, d, scale, unit, form, guard, out_, before_, over)


def _pieces(x: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Matching flat pieces of the state x and of tensors of its shape (a mask has an eighth of its elements)."""
    for start in range(0, x.numel(), PIECE):
        yield tuple(None if t is None else _piece(t, x, start) for t in (x, *others))


def _piece(t: Tensor, x: Tensor, start: int) -> Tensor:
    if t.dtype == torch.uint8 and t.shape != x.shape:
        return t[start // 8 : (start + PIECE) // 8]
    return t.as_strided((min(PIECE, t.numel() - start),), (1,), t.storage_offset() + start)
