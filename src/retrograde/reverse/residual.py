"""The plain residual network, γ = 0: x ← x + f(x), bit for bit as the blocks themselves would compute it.

A step forgets what was before it, so it cannot be reversed; every other way of remembering works. The addition is
autograd's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .extra import Extra
from .forward import Block, Pass


class Residual:
    """x of a plain residual network: a state without integers, and without a gradient of its own."""

    fixed = None
    gradient = None

    def __init__(self, x0: Tensor, form: str) -> None:
        self.x = x0
        self.form = form

    def advance(self, k: int, y: Tensor) -> Tensor:
        x = self.x
        if self.form == "relu":
            # the sum has y's dtype, as with the in-place addition that such blocks make
            self.x = (x + y).to(y.dtype).relu_()
        else:
            self.x = y if self.form == "block" else x + y
        return self.x


class PlainPass(Pass):
    """A pass of a plain residual network. Its blocks keep their input, or all of their tensors."""

    def __init__(self, x0: Tensor, form: str, depth: int, **ways: Any) -> None:
        super().__init__(Residual(x0, form), x0, depth, **ways)

    def begin(self, state: Residual, x0: Tensor) -> None:
        self.state = state
        self.k = 0
        self.again = None
        self.record()
        self.x = x0

    def step(self, block: Block, extra: Extra, name: str | None = None, form: str | None = None) -> Tensor:
        y = self._output(block, extra, self.k, name or f"block {self.k}")
        self.x = self.state.advance(self.k, y)
        self.k += 1
        return self.x

    def finish(self) -> Tensor:
        return self.x
