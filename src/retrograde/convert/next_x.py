"""The tensor that continues a pass: what a block of a stage returns, and how the next block knows it.

A block of form "block" returns the next x, and the next block is given that tensor, or an alias of it: hooks of modules and FSDP2 make
those. An alias continues the pass if it has the same memory, untouched, and its gradient goes to that tensor unchanged.

A block of form "branch" returns f, which the model adds: x = x + block(x). Here the block gives the difference between the next x and
x. Added to x as floats, it would give the next x only up to rounding, in a tensor that no block knows; so this one addition returns
the next x itself. Everything else sees the difference as a plain tensor.

Between two blocks x may be changed in a way that no version counts: through `.data`, NumPy, or a collective. The next step would go on
from the integers and leave that out. So a hash of what a block handed on is compared with one of what comes back: of an evenly spread
sample, or with verify="strict" of all of it. A CPU raises at once. An accelerator is not waited for: there the error comes at the start
of a later pass (`reverse.deferred`), with "strict" at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..arithmetic.hash import digest
from ..errors import ReplayError
from ..reverse.deferred import Deferred
from ..reverse.fingerprint import spread
from ..reverse.parts import version

SAMPLE, APART = 1024, 509
"""So many elements are compared at least, and one of so many in a row: a change to that many neighbours is always found."""
FSDP2 = {"RegisterPostBackwardFunctionBackward"}
_IDENTITIES = FSDP2 | {"AddedBackward", "BackwardHookFunctionBackward", "AliasBackward0", "ViewBackward0"}
"""Nodes of autograd's graph that hand on a tensor and its gradient as they are (`Added`: by way of another)."""
_IN_PLACE = {Tensor.__iadd__, Tensor.add_}
_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__} | _IN_PLACE


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


class Branch(Tensor):
    """x₁ − x₀, which x₀ + … turns into x₁."""

    pair: tuple[Tensor, Tensor, tuple[int, int, int]]
    unseen: Unseen
    hashes: tuple[Tensor | None, ...]
    path: str
    changed: list[str]  # receives the names of functions that make another tensor of its shape

    @staticmethod
    def of(x0: Tensor, x1: Tensor, unseen: Unseen, path: str, changed: list[str]) -> Tensor:
        plain = x1 - x0
        difference = plain.as_subclass(Branch)
        difference.pair = (x0, x1, (version(x0), version(x1), version(difference)))
        difference.unseen, difference.path, difference.changed = unseen, path, changed
        difference.hashes = unseen.hashed(x0), unseen.hashed(plain)
        return difference

    def check(self) -> None:
        """Raise if x or this was changed, before they are added up."""
        with torch._C.DisableTorchFunctionSubclass():
            self.unseen.compare(self.pair[0], self.hashes[0], f"the x that {self.path} was given")
            self.unseen.compare(self, self.hashes[1], f"the output of {self.path}")

    def next_x(self, *terms: Tensor) -> Tensor:
        """The next x, which is the sum of these; by way of them where somebody waits for the gradient of this tensor."""
        x1 = self.pair[1]
        with torch._C.DisableTorchFunctionSubclass():
            if not (self.retains_grad or self._backward_hooks):
                return x1
        alias: Tensor = Added.apply(x1, *map(_plain, terms))
        alias.__dict__["_next_x"] = x1  # which the stage knows while it lives
        return alias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        adds = func in _ADDITIONS and len(args) == 2 and not kwargs
        if adds:
            for this, other in (args, args[::-1]):
                if isinstance(this, Branch) and isinstance(other, Tensor) and _adds_up(this, other):
                    this.check()
                    if func not in _IN_PLACE:
                        return this.next_x(*args)
                    with torch._C.DisableTorchFunctionSubclass():
                        func(*args)  # for others who have the tensor that is written to
                    return this.next_x(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            for this in args if not adds else ():
                if isinstance(this, Branch) and isinstance(result, Tensor) and result.shape == this.shape:
                    if result is this and version(this) == this.pair[2][2]:
                        return result  # as it is: of dropout in evaluation, say
                    this.changed.append(func.__name__)
        return _plain(result)


class Added(Function):
    """x₁, whose gradient goes to the terms of the sum that it is.

    Its memory and its count of writes, but no view of it to autograd, which would refuse to have it written to.
    """

    @staticmethod
    def forward(ctx: Any, x1: Tensor, *terms: Tensor) -> Tensor:
        ctx.terms = len(terms)
        return x1.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[g] * ctx.terms


def _adds_up(branch: Branch, x: Tensor) -> bool:
    """Whether x + branch is the next x: all three are as they were."""
    x0, x1, (then, *others) = branch.pair
    if [version(x1), version(branch)] != others or (x.requires_grad and not x1.requires_grad):
        return False
    if x1.requires_grad and not torch.is_grad_enabled():
        return False  # the sum has no gradient
    return same(x, x0, then) or same(x0, x, then)  # the block may have been given an alias, by a hook


def _plain(result: Any) -> Any:
    if isinstance(result, Branch):
        return result.as_subclass(Tensor)
    return type(result)(map(_plain, result)) if type(result) in (tuple, list) else result
