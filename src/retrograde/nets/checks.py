"""Checks that the networks of the family share: options, blocks, inputs and numbers.

What they need of the engine for it is imported here, and here only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import Tensor, nn

from ..reverse.cuda import capturing
from ..reverse.inputs import check_input, check_transforms

__all__ = ["check_finite", "check_input", "choice", "modules", "positive", "whole"]


class Choice:
    """An option of a network that takes one of a few words. It may be set, between passes."""

    def __init__(self, what: str, allowed: tuple[str, ...]) -> None:
        self.__doc__ = f"{what[0].upper()}{what[1:]}: {', '.join(map(repr, allowed))}."
        self.allowed = allowed

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, net: Any, value: str) -> None:  # and it is read where it is kept, since there is no __get__
        net.__dict__[self.name] = choice(self.name, value, self.allowed)


def choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """`value`. Raises unless it is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")
    return value


def modules(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks of a network, one by one."""
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise TypeError(
            f"blocks must be several modules; got one {type(blocks).__name__}. Pass [block] * depth to repeat it."
        )
    listed = list(blocks)
    if not listed:
        raise ValueError("blocks is empty: a momentum network needs at least one block.")
    for k, block in enumerate(listed):
        if not isinstance(block, nn.Module):
            raise TypeError(f"block {k} must be an nn.Module; got {type(block).__name__}. Wrap a function in a module.")
    return listed


def positive(name: str, value: Any, below: float = math.inf, why: str = "") -> float:
    """`value` as a float. Raises unless it is a number above 0 and below a bound."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number; got {value!r}.")
    if not 0 < float(value) < below:
        allowed = f"above 0 and below {below:g}" if below < math.inf else "above 0 and finite"
        raise ValueError(f"{name} must be {allowed}; got {value!r}. {why}".rstrip())
    return float(value)


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value`. Raises unless it is a whole number from `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number from {least}; got {value!r}.")
    return value


def check_finite(x: Tensor, what: str = "the input") -> None:
    """Raise if x has NaN or Inf values: an iteration or a solver would spread them."""
    check_input(x)
    check_transforms()
    if capturing(x):  # a CUDA graph is being captured, so values cannot be read
        return
    if not x.isfinite().all():
        bad = int((~x.isfinite()).sum())
        raise ValueError(
            f"{what} has {bad} values of {x.numel()} that are NaN or Inf; all must be finite. Find where they come from."
        )


def check_halves(x: Tensor, dim: int) -> None:
    """Raise unless x can be split in two along a dimension."""
    if x.dim() == 0 or not -x.dim() <= dim < x.dim() or x.shape[dim] % 2:
        given = f"{x.shape[dim]} channels" if x.dim() and -x.dim() <= dim < x.dim() else "no such dimension"
        raise ValueError(
            f"a coupling splits its input in two along dim={dim}, so it needs an even number of channels there; got "
            f"{given} in shape {tuple(x.shape)}. Pad a channel, or repeat the input (torch.cat([x, x], dim={dim}))."
        )
