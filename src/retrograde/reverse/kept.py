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
from .replay import Call


class Kept:
    """One block's input. Nobody may change the float."""

    needs_output = False  # a replay may stop at the last tensor that autograd saved

    def __init__(self, x: Tensor) -> None:
        self.hold(x)

    def hold(self, x: Tensor) -> None:
        self.x = x
        self.version = x._version
        self.fixed: FixedPoint | None = None

    def note(self, k: int, call: Call, saves: bool, state: Any) -> None:
        """Block k has run on it: hold what its replay will need."""
        if state.fixed is None:  # of a plain network
            if call.writes:
                raise ReplayError(
                    f"{call.name} writes to its input, so its input cannot be kept. Use memory='store' for it."
                )
        elif saves and state.fixed.dtype.itemsize < state.dtype.itemsize:
            self.hold(getattr(state, state.input_name(k)).clone())
            self.fixed = state.fixed
            self.dtype = state.dtype
        elif call.writes:
            self.hold(state.read())

    def recall(self, k: int) -> Tensor:
        if self.x._version != self.version:
            raise ReplayError(
                f"the input of block {k}, kept for its backward pass, was changed. Change a copy instead."
            )
        x = self.x.detach()
        if self.fixed is None:
            return x
        out = torch.empty_like(x, dtype=self.dtype)
        kernels_for(x, x.dtype).decode(x, self.fixed.unit, out)
        return out

    def settle(self, k: int, y: Any, now: bool) -> None: ...
    def abandon(self, x: Tensor) -> None: ...
    def pass_by(self, k: int) -> None: ...
