"""What a converted branch returns: f(x) of the momentum network, and on being added to x, the next x itself.

A model that writes `x = x + block(x)` gets, from each step of a stage of form "branch", the difference between the next x
and this one. Added to this x it would give the next one only up to rounding, and no tensor that the next block could know;
so that one addition returns the next x as the stage holds it. Everything else sees the difference, as a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .alias import same, version

_IN_PLACE = {Tensor.__iadd__, Tensor.add_}
_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__} | _IN_PLACE


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


class Branch(Tensor):
    """x₁ − x₀, which x₀ + … turns into x₁."""

    pair: tuple[Tensor, Tensor, tuple[int, int, int]]

    @staticmethod
    def of(x0: Tensor, x1: Tensor) -> Tensor:
        difference = (x1 - x0).as_subclass(Branch)
        difference.pair = (x0, x1, (version(x0), version(x1), version(difference)))
        return difference

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
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            for this, other in (args, args[::-1]):
                if isinstance(this, Branch) and isinstance(other, Tensor) and _adds_up(this, other):
                    if func not in _IN_PLACE:
                        return this.next_x(*args)
                    with torch._C.DisableTorchFunctionSubclass():
                        func(*args)  # for others who have the tensor that is written to
                    return this.next_x(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _plain(result)


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
