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
    """x₀ and x₁ − x₀ → x₁: its gradient goes by the difference."""

    @staticmethod
    def forward(ctx: Any, x0: Tensor, difference: Tensor, x1: Tensor) -> Tensor:
        return x1.view_as(x1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, g, None


class Branch(Tensor):
    """x₁ − x₀, which x₀ + … turns into x₁."""

    pair: tuple[Tensor, Tensor, tuple[int, int]]

    @staticmethod
    def of(x0: Tensor, x1: Tensor) -> Tensor:
        difference = (x1 - x0).as_subclass(Branch)
        difference.pair = (x0, x1, (version(x0), version(difference)))
        return difference

    def onto(self, x: Tensor) -> Tensor:
        """The next x, for the x that this one was added to; by way of this tensor where somebody waits for its gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            waits = self.retains_grad or self._backward_hooks
        return Added.apply(x, self.as_subclass(Tensor), self.pair[1]) if waits else self.pair[1]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            for this, other in (args, args[::-1]):
                if isinstance(this, Branch) and isinstance(other, Tensor) and _adds_up(this, other):
                    if func in _IN_PLACE:  # for others who have the tensor that is written to
                        with torch._C.DisableTorchFunctionSubclass():
                            func(*args)
                    return this.onto(other)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _plain(result)


def _adds_up(branch: Branch, x: Tensor) -> bool:
    """Whether x + branch is the next x: both are as they were."""
    x0, x1, (then, at_first) = branch.pair
    if version(branch) != at_first or (x.requires_grad and not x1.requires_grad):
        return False
    return same(x, x0, then) or same(x0, x, then)  # the block may have been given an alias, by a hook


def _plain(result: Any) -> Any:
    if isinstance(result, Branch):
        return result.as_subclass(Tensor)
    return type(result)(map(_plain, result)) if type(result) in (tuple, list) else result
