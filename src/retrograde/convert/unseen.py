"""A change between two blocks that no version counts: through `.data`, NumPy, or a collective.

The next step would go on from the integers and leave such a change out. So a hash of what a block handed on is compared with one of
what comes back: of an evenly spread sample, or with verify="strict" of all of it. A CPU raises at once. An accelerator is not waited
for: there the error comes at the start of a later pass (`reverse.deferred`), with "strict" at once.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..arithmetic.hash import digest
from ..errors import ReplayError
from ..reverse.deferred import Deferred
from ..reverse.fingerprint import spread

SAMPLE, APART = 1024, 509
"""So many elements are compared at least, and one of so many in a row: a change to that many neighbours is always found."""


class Unseen:
    """The comparisons of one pass."""

    def __init__(self, verify: str, deferred: Deferred) -> None:
        self.verify = verify
        self.deferred = deferred
        self.names: list[str] = []
        self.left: list[Tensor] = []
        self.over = False

    def hashed(self, x: Tensor) -> Tensor | None:
        """The hash of a tensor as it is handed on."""
        if self.verify == "off" or type(x) is not Tensor or x.is_meta:
            return None
        return digest(self._compared(x))

    def compare(self, x: Tensor, hashed: Tensor | None, what: str, wait: bool | None = None) -> None:
        """It has come back; in an error it is called so. `wait` for the result: where that costs nothing, or with "strict"."""
        if hashed is None:
            return
        left = hashed - digest(self._compared(x))
        if (self.verify == "strict" or x.device.type == "cpu") if wait is None else wait:
            if left:
                _judge((what,), left, "this")
            return
        self.names.append(what)
        self.left.append(left)
        if self.over:  # what the last block gave, added to x
            self.end()

    def end(self) -> None:
        """The pass is over: on an accelerator, tell what was found."""
        self.over = True
        if self.left:
            names, left = tuple(self.names), torch.stack(self.left)
            self.names, self.left = [], []
            self.deferred.tell(left.ne(0).to(torch.uint8), partial(_judge, names), names)

    def _compared(self, x: Tensor) -> Tensor:
        x = x.detach()
        return x if self.verify == "strict" or x.numel() <= SAMPLE else x.as_strided(*spread(x, SAMPLE, APART))


def _judge(names: tuple[str, ...], left: Tensor, when: str) -> None:
    if not left.any():
        return
    name = names[int(left.reshape(-1).ne(0).nonzero()[0])]
    raise ReplayError(
        f"{name} was changed between two blocks of {when} pass in a way that PyTorch does not count: through .data, NumPy, or a "
        "collective. The next step would leave that out. Change x by an operation (x = x + a, x.add_(a)), or inside of a block."
    )
