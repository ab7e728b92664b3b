"""What a converted branch returns: f(x) of the momentum network, and on being added to x, the next x itself.

A model that writes `x = x + block(x)` gets, from each step of a stage of form "branch", the difference between the next x
and this one. Added to this x it would give the next one only up to rounding, and no tensor that the next block could know;
so that one addition returns the next x as the stage holds it. Everything else sees the difference, as a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .alias import same, version

_IN_PLACE = {Tensor.__iadd__, Tensor.add_}
_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__} | _IN_PLACE


class Branch(Tensor):
    """x₁ − x₀, which x₀ + … turns into x₁."""

    pair: tuple[Tensor, Tensor, int]

    @staticmethod
    def of(x0: Tensor, x1: Tensor) -> Tensor:
        difference = (x1 - x0).as_subclass(Branch)
        difference.pair = (x0, x1, version(x0))
        return difference

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            for this, other in (args, args[::-1]):
                if isinstance(this, Branch) and isinstance(other, Tensor) and same(other, this.pair[0], this.pair[2]):
                    if func in _IN_PLACE:  # for others who have the tensor that is written to
                        with torch._C.DisableTorchFunctionSubclass():
                            func(*args)
                    return this.pair[1]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _plain(result)


def _plain(result: Any) -> Any:
    if isinstance(result, Branch):
        return result.as_subclass(Tensor)
    return type(result)(map(_plain, result)) if type(result) in (tuple, list) else result
