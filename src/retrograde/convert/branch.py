"""What a block of form "branch" returns: f, which the model adds to x.

    x = x + block(x)

The block gives the difference between the next x and x. Added to x as floats, it would give the next x only up to rounding, in a tensor
that no block knows; so this one addition returns the next x itself. Everything else sees the difference as a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..reverse.changes import version
from .next_x import Unseen, same

_IN_PLACE = {Tensor.__iadd__, Tensor.add_}
_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__} | _IN_PLACE


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
