"""A hash of some elements of several tensors on a CPU, in one call of compiled code.

A step compares dozens of small samples. Gathered by torch, each would take four operators; that is more than the rest of it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

Groups = tuple[int, int, int]
"""Of a tensor: how many groups of elements, how far apart, and of how many elements each."""


@cache
def _compiled() -> Any:
    try:
        from . import native
    except ImportError:  # the fast kernels may be missing
        return None
    library = native._library()
    if library is None:
        return None
    function = library.retrograde_sample
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    function.restype = None
    return function


def can_sample() -> bool:
    """Whether there is compiled code for it."""
    return _compiled() is not None


def sample(tensors: Sequence[Tensor], groups: Iterable[Groups], into: Tensor, sign: int) -> None:
    """Add sign times the hash of the groups of each tensor to `into`: at most 8192 bytes of one, within its memory."""
    places = array("q")
    for t, (count, step, together) in zip(tensors, groups, strict=True):
        places.extend((t.data_ptr(), count, step * t.itemsize, together * t.itemsize))
    _compiled()(places.buffer_info()[0], len(tensors), sign, into.data_ptr())
