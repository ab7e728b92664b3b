"""Space to channels: a permutation, so that integers come back as they were. The invertible down-sampling of i-RevNets.

squeeze     (N, C, r·H, r·W) → (N, r²·C, H, W): every r × r square of pixels becomes r² channels
unsqueeze   (N, r²·C, H, W) → (N, C, r·H, r·W): the inverse
"""

from __future__ import annotations

import torch
from torch import Tensor


def squeeze(x: Tensor, r: int) -> Tensor:
    """
    >>> torch.equal(unsqueeze(squeeze(torch.arange(32).view(1, 2, 4, 4), 2), 2).flatten(), torch.arange(32))
    True
    """
    if r == 1:
        return x
    if x.dim() != 4 or x.shape[2] % r or x.shape[3] % r:
        raise ValueError(
            f"a squeeze by {r} needs images (N, C, H, W) with H and W divisible by {r}; got {tuple(x.shape)}. Pad or crop "
            "the images, or use fewer squeezes."
        )
    n, c, h, w = x.shape
    return fresh(x.reshape(n, c, h // r, r, w // r, r).permute(0, 3, 5, 1, 2, 4).reshape(n, r * r * c, h // r, w // r))


def unsqueeze(x: Tensor, r: int) -> Tensor:
    """The inverse of `squeeze`."""
    if r == 1:
        return x
    n, c, h, w = x.shape
    return fresh(
        x.reshape(n, r, r, c // (r * r), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (r * r), r * h, r * w)
    )


def fresh(x: Tensor) -> Tensor:
    """x with the strides of a fresh tensor, also where a size of 1 leaves them open: convolutions choose by strides."""
    return x.clone(memory_format=torch.contiguous_format)
