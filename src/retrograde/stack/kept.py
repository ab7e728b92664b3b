"""A block's input, kept from forward to backward.

    float      as the block was given it
    integers   as it stands in the state, where that is narrower (16 bits for float32): half the bytes, the same bits once decoded

The integers are a copy, which nobody else can change; the float is the block's own input, and a change is an error.
"""

from __future__ import annotations

from torch import Tensor

from ..core.fixedpoint import FixedPoint
from ..core.tape import Kept
from .momentum import Momentum, decoded


class Held(Kept):
    """A block's input, kept as a float, or from `hold_integers` on as integers."""

    fixed: FixedPoint | None = None  # of the integers

    def hold_integers(self, state: Momentum) -> None:
        """Hold x of the state, before the step moves it, in place of the float."""
        self.hold(state.x.clone())
        self.fixed, self.dtype = state.fixed, state.dtype

    def recall(self, k: int) -> Tensor:
        x = super().recall(k)
        return x if self.fixed is None else decoded(x, self.fixed, self.dtype)
