"""Checks that the networks of the family share: options, blocks, inputs and numbers.

What they need of the engine for it is imported here, and here only.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from torch import Tensor

from ..reverse.cuda import capturing
from ..reverse.inputs import check_input, check_transforms
from .momentum import _choice as choice
from .momentum import _modules as modules

__all__ = ["check_finite", "check_input", "choice", "modules", "positive", "whole"]


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
