"""Which implementation of the kernels runs on a tensor.

    tensor                          kernels          without it
    on a CPU                        cpu (C)          reference
    on a CUDA device                cuda (Triton)    reference
    without values (FakeTensor)     nothing to compute
    any other subclass or device    reference

All give the bits of `reference`, so deleting a file changes speed only. An implementation is imported when a tensor first needs it.

Kernels take tensors as flat runs of memory. So a pass holds its state in dense tensors of one layout, and what comes from outside is
brought to that layout before (`reverse.scheme.plain`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter

from . import reference
from .reference import Kernels


def _nothing(*_: Any) -> None: ...


def _copied(t: Tensor) -> None:
    """On a CPU 16-bit outputs of convolutions may be laid out otherwise than they say without values: then they are copied."""
    if t.device.type == "cpu" and t.dtype.itemsize < 4:
        torch.empty_like(t)


def _step(x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, *_: Any) -> None:
    _copied(y)


def _carry(p: Tensor | None, h: Tensor | None, d: Tensor, *_: Any) -> None:
    _copied(d)


WITHOUT_VALUES = Kernels(*[_nothing] * len(Kernels._fields))._replace(advance=_step, retreat=_step, carry=_carry)
"""Nothing is computed. What is made meanwhile counts when memory is planned."""


class _Table(dict[tuple[type, str, torch.dtype], Kernels]):
    """The kernels, by the type of a tensor, its kind of device, and the integers of the state. An entry is made when first needed."""

    def __missing__(self, key: tuple[type, str, torch.dtype]) -> Kernels:
        kind, device, integers = key
        found = reference.KERNELS
        if issubclass(kind, FakeTensor):
            found = WITHOUT_VALUES
        elif kind in (Tensor, Parameter) and device in ("cpu", "cuda"):
            with suppress(ModuleNotFoundError):  # it, or the package that it is written in, may be missing
                found = import_module(f".{device}", __package__).kernels(integers)
        self[key] = found
        return found


KERNELS = _Table()


@cache
def sampler(device: str) -> Callable[[Tensor, int, int, Tensor, int, int], None] | None:
    """Compiled code that adds the hash of some elements of a tensor to another (`sample` in cpu.c); None if there is none.

    A step compares dozens of small samples. Gathered by torch, each would take four operators; that is more than the rest of it.
    """
    if device == "cpu":
        with suppress(ModuleNotFoundError):
            return import_module(".native", __package__).function("sample")
    return None


def kernels_for(t: Tensor, integers: torch.dtype = torch.int32) -> Kernels:
    """The kernels for a state like t, held in these integers."""
    return KERNELS[type(t), t.device.type, integers]


def digest(t: Tensor, into: Tensor | None = None, seed: int = 0, sign: int = 1) -> Tensor:
    """Add sign times the hash of any tensor to `into`, a 64-bit integer on its device; returns that integer.

    `seed` tells tensors apart. `reference.digest` defines the hash.

    >>> a = torch.arange(6.0)
    >>> bool(digest(a) == digest(a.clone())), bool(digest(a) == digest(a.flip(0)))
    (True, False)
    """
    t = getattr(t, "_local_tensor", t).detach()
    t = (t if type(t) is Tensor or isinstance(t, FakeTensor) else t.clone()).resolve_neg()
    into = torch.zeros((), dtype=torch.int64, device=t.device) if into is None else into
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    if not t.is_contiguous():  # any dense layout is taken as it lies in memory
        t = t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).contiguous()
    if t.numel():
        kernels_for(t).digest(t, into, seed, sign)
    return into
