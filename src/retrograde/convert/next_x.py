"""How a block of a stage knows the x that the block before it handed on: the pass goes on where that tensor comes back.

Hooks of modules and FSDP2 make aliases of it. An alias continues the pass if it has the same memory, untouched, and its gradient goes
to that tensor unchanged.

Between two blocks x may be changed in a way that no version counts: through `.data`, NumPy, or a collective. The next step would go on
from the integers and leave that out. So a hash of what a block handed on is compared with one of what comes back: of an evenly spread
sample, or with verify="strict" of all of it. A CPU raises at once. An accelerator is not waited for: there the error comes at the start
of a later pass (`reverse.deferred`), with "strict" at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.kernels import digest
from ..errors import ReplayError
from ..memory.budget import Observer
from ..reverse.changes import version
from ..reverse.deferred import Deferred
from ..reverse.fingerprint import spread
from ..reverse.forward import Pass

SAMPLE, APART = 1024, 509
"""So many elements are compared at least, and one of so many in a row: a change to that many neighbours is always found."""
FSDP2 = {"RegisterPostBackwardFunctionBackward"}
_IDENTITIES = FSDP2 | {"AddedBackward", "BackwardHookFunctionBackward", "AliasBackward0", "ViewBackward0"}
"""Nodes of autograd's graph that hand on a tensor and its gradient as they are (`Added` of `branch`: by way of another)."""


class Open:
    """A pass that is between two blocks: the x handed on, as it was then, and who else watches the pass."""

    def __init__(self, run: Pass, training: bool, observer: Observer | None, unseen: Unseen) -> None:
        self.run = run
        self.training = training
        self.observer = observer
        self.unseen = unseen
        self.x: Callable[[], Tensor | None] = lambda: None

    def hand_on(self, x: Tensor, index: int, gone: Callable[[Any], None]) -> None:
        """The block of this index returns x. `gone` is called if nobody has it any more."""
        self.index = index
        self.hashed = self.unseen.hashed(x)
        self.version = version(x)
        self.x = weakref.ref(x, gone)

    def known(self, x: Tensor) -> bool:
        """Whether this is the x that was handed on, untouched."""
        mine = self.x()
        return mine is not None and same(x, mine, self.version)


class OpenPasses(threading.local):
    """The passes of a stage that are between two blocks, those of each thread for itself. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self.passes: list[Open] = []
        self.ended: Callable[[], Tensor | None] = lambda: None  # what the last pass returned
        self.latest = -1  # the block that ran last
        self.changed: list[str] = []  # functions that made another f of what the last block returned (form "branch")

    def __reduce__(self) -> Any:
        return OpenPasses, ()


class Waiting:
    """What deployed blocks of form "branch" hand on, by thread. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self.by: dict[int, Any] = {}

    def __reduce__(self) -> Any:
        return Waiting, ()


def same(x: Tensor, mine: Tensor, at: int) -> bool:
    """Whether x is `mine` as it was at that version, in value and gradient."""
    if version(x) != at:
        return False
    if x is mine:
        return True
    memory, mine_too = ((t.data_ptr(), t.shape, t.stride(), t.dtype, t.untyped_storage()._cdata) for t in (x, mine))
    if memory != mine_too:
        return False
    return handed_on(x, mine) is not None if mine.requires_grad else not x.requires_grad


def handed_on(x: Tensor, mine: Tensor) -> set[str] | None:
    """The nodes through which the gradient of x goes on its way to `mine`; None if any of them may change it, or leads elsewhere."""
    node: Any = x.grad_fn
    place, passed = x.output_nr, set[str]()
    while node is not None and node is not mine.grad_fn:
        if getattr(node, "variable", None) is mine:  # a leaf
            return passed
        nexts = node.next_functions
        if node.name() not in _IDENTITIES or not 0 <= place < len(nexts):
            return None
        passed.add(node.name())
        node, place = nexts[place]
    return passed if node is not None and place == mine.output_nr else None


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
