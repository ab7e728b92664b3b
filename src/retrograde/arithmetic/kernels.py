"""Which implementation of the kernels runs on a tensor.

    tensor                          kernels          without it
    on a CPU                        cpu              reference
    on a CUDA device                cuda (Triton)    reference
    without values (FakeTensor)     shapes
    any other subclass or device    reference

Each is a module with the same seven functions: advance, pull, retreat, encode, decode, carry, digest. All give the bits of `reference`,
so deleting a file changes speed only. An implementation is imported when a tensor first needs it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

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
