"""What each memory mode keeps from forward to backward, and which keeps least.

"reverse"      x, v and the information buffers, once, whatever the depth
"checkpoint"   every block's input
"store"        whatever autograd saves
"""

from __future__ import annotations

import torch

from ..core.fixedpoint import integer_dtype
from .momentum import Recurrence

MODES = ("reverse", "checkpoint", "store", "auto")


def holding(recurrence: Recurrence, dtype: torch.dtype) -> dict[str, int]:
    """Bytes held per element of x, by mode, for inputs of this dtype. A plain step (γ = 0) cannot be reversed.

    >>> from fractions import Fraction
    >>> holding(Recurrence((Fraction(9, 10),) * 3, residual=False), torch.bfloat16)
    {'checkpoint': 6, 'reverse': 9}
    """
    held = {"checkpoint": dtype.itemsize * len(recurrence.gammas)}
    if 0 not in recurrence.gammas:
        held["reverse"] = 2 * integer_dtype(dtype).itemsize + sum(b.itemsize for b in recurrence.begins.values() if b)
    return held


def cheapest(recurrence: Recurrence, dtype: torch.dtype) -> str:
    """The mode that holds least; "checkpoint" where it is a tie."""
    held = holding(recurrence, dtype)
    return min(held, key=held.__getitem__)
