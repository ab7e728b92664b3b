"""Tensors as flat runs of memory: what lets a kernel work on any dense layout without copies."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


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
