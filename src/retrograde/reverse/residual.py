"""The plain residual network, γ = 0: x ← x + f(x), bit for bit as the blocks themselves would compute it.

A step forgets what was before it, so it cannot be reversed; every other way of remembering works. The addition is
autograd's own.
"""

from __future__ import annotations

from torch import Tensor


class Residual:
    """x of a plain residual network; the part of a `scheme.State` that a pass needs without tokens."""

    def __init__(self, x0: Tensor, form: str) -> None:
        self.x = x0
        self.form = form

    def read(self) -> Tensor:
        return self.x

    def advance(self, k: int, y: Tensor) -> Tensor:
        x = self.x
        if self.form == "relu":
            self.x = (
                (x + y).to(y.dtype).relu_()
            )  # the sum has y's dtype, as with the in-place addition that such blocks make
        else:
            self.x = y if self.form == "block" else x + y
        return self.x

    def free(self) -> None:
        del self.x
