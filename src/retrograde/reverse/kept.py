"""A block's input, kept for its replay: the float, or a copy of its integers where these take fewer bytes.

It stands where a `tape.Tape` does where the state is rewound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from ..arithmetic.kernels import kernels_for
from ..errors import ReplayError


class Kept:
    """One block's input. Nobody may change the float."""

    needs_output = False
    """Whether a replay must run to its end."""

    def __init__(self, x: Tensor) -> None:
        self.hold(x)

    def hold(self, x: Tensor) -> None:
        self.x = x
        self.version = x._version
        self.fixed: FixedPoint | None = None

    def hold_integers(self, q: Tensor, fixed: FixedPoint, dtype: torch.dtype) -> None:
        self.hold(q.clone())
        self.fixed = fixed
        self.dtype = dtype

    def recall(self, k: int) -> Tensor:
        if self.x._version != self.version:
            raise ReplayError(
                f"the input of block {k}, kept for its backward pass, was changed. Change a copy instead."
            )
        x = self.x.detach()
        if self.fixed is None:
            return x
        out = torch.empty_like(x, dtype=self.dtype)
        kernels_for(x, x.dtype).decode(x, 2.0**-self.fixed.bits, out)
        return out

    def settle(self, k: int, y: Any, now: bool) -> None: ...
    def abandon(self, x: Tensor) -> None: ...
    def pass_by(self, k: int) -> None: ...
