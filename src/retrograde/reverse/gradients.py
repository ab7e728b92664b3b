"""Parts of the momentum gradient that not every network needs: for second derivatives, and for what only some blocks compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arithmetic.reference import carried, unpacked
from .nodes import keeps_graph, traced

if TYPE_CHECKING:
    from .momentum import MomentumGradient


def carried_in_graph(
    p: Tensor | None, h: Tensor | None, d: Tensor, numbers: tuple[float, float, float, float, int],
    mask: Tensor | None, after: Tensor | None, strides: tuple[int, ...], dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """gx, gy and what the block gets, as the kernel `carry` makes them, where the backward pass is itself differentiated."""
    passed, passed_after = (None if m is None else unpacked(m, d.shape, strides) for m in (mask, after))
    gx, gy = carried(p, h, d, numbers, passed, passed_after)
    return gx.to(dtype), gy.to(dtype), gy if passed is None else torch.where(passed, gy, 0)


def add(a: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """a + b in this dtype, into a's memory where it is an array and no graph is made of it; b is never written to."""
    if a is None or b is None:
        return a if b is None else b.to(dtype, copy=True)
    return a + b if traced(a, b) or 0 in a.stride() else a.add_(b)


def through_form(gradient: MomentumGradient, k: int, gx: Tensor | None, gf: Tensor) -> tuple[Tensor | None, Tensor]:
    """Gradients of x and of block k's output y, from those of x and of f, which form "block" or "relu" makes of both."""
    if gradient.forms[k] != 2:
        return (add(gx, -gf, gradient.dtype) if gradient.forms[k] else gx), gf
    passed = unpacked(mask_of(gradient, k), gf.shape, gradient.strides)
    return add(gx, -torch.where(passed, 0, gf), gradient.dtype), torch.where(passed, gf, 0)


def mask_of(gradient: MomentumGradient, k: int) -> Tensor:
    """Where the relu of block k passed its input. The masks above are let go of, unless the graph is to be run through again."""
    masks = gradient.masks
    if k not in masks:
        raise RuntimeError(
            "The backward pass of this network has run. To run it twice, pass retain_graph=True to the first."
        )
    if not keeps_graph():
        masks.pop(k + 2, None)
        if k == 0:
            masks.pop(1, None)
            return masks.pop(0)
    return masks[k]
