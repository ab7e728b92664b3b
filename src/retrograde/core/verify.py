"""Proof that a replay used the right activations, and nothing lost if it did not.

`checksum` is a 64-bit hash of a tensor's bits and their places: two outputs of a block that differ anywhere have the same
one with a chance of about 2^−64. `Gradients` remembers `.grad` before a backward pass, to put it back if the proof fails.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20
_MIX = [c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]  # as signed 64-bit integers


def checksum(t: Tensor) -> int:
    """A hash of t's bits, in the order of its elements.

    >>> a = torch.arange(6.0)
    >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0))
    (True, False)
    """
    flat = t.detach().contiguous().view(-1)
    if t.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, flat.numel(), _PIECE):
        bits = flat[start : start + _PIECE].view(_INTEGERS[flat.element_size()]).long()
        place = torch.arange(start, start + bits.numel(), device=t.device)
        h = bits * _MIX[0] + place * _MIX[1]
        h = (h ^ (h >> 29)) * _MIX[2]
        total += (h ^ (h >> 32)).sum()
    return int(total)


class Gradients:
    """The gradients of some parameters as they are now."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.entries = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in set(parameters)]

    def restore(self) -> None:
        for p, gradient, values in self.entries:
            p.grad = gradient
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)
