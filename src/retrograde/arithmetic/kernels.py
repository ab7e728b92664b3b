"""Which implementation of the kernels runs on a tensor.

    tensor                          kernels          without it
    on a CPU                        cpu              reference
    on a CUDA device                cuda (Triton)    reference
    without values (FakeTensor)     shapes
    any other subclass or device    reference

Each is a module with the same seven functions: advance, pull, retreat, encode, decode, carry, digest. All give the bits of `reference`,
so deleting a file changes speed only. An implementation is imported when a tensor first needs it.

Kernels take tensors as flat runs of memory, which lets them work on any dense layout without copies (`alike`, `laid_out_as`).
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter

NAMES = ("advance", "pull", "retreat", "encode", "decode", "carry", "digest")
_FAST = {"cpu": "cpu", "cuda": "cuda"}


def kernels_for(t: Tensor) -> Any:
    """The module whose functions run on tensors like t."""
    kind = type(t)
    if kind is Tensor or kind is Parameter:
        return _of_device(t.device.type)
    return _module("shapes") if issubclass(kind, FakeTensor) else _module("reference")


def with_address(t: Tensor) -> Tensor:
    """t; or a plain copy of a subclass that may hold its values elsewhere (a collective under way)."""
    return t if type(t) in (Tensor, Parameter) or isinstance(t, FakeTensor) else t.clone()


@cache
def _of_device(device: str) -> Any:
    name = _FAST.get(device)
    found = None if name is None else _module(name)
    return _module("reference") if found is None else found


@cache
def _module(name: str) -> Any:
    """A module of this folder; None where it, or the package it is written in, is missing."""
    try:
        return import_module(f".{name}", __package__)
    except ModuleNotFoundError:
        return None


@lru_cache(maxsize=1024)
def dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the elements of a tensor fill one run of memory, in some order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def alike(t: Tensor, *others: Tensor | None) -> bool:
    """Whether t is dense and not empty, and the others are laid out as it is."""
    strides = t.stride()
    for other in others:
        if other is not None and other.stride() != strides:
            return False
    return dense(t.shape, strides) and t.numel() > 0


def laid_out_as(like: Tensor, t: Tensor) -> Tensor:
    """t, or a copy of it in the layout of `like`."""
    return t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)
