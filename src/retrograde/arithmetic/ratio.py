"""γ as a ratio n/d. A float is turned once into a ratio; from then on γ *is* that ratio, in every memory mode."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

import torch

NARROW, LIMIT = 2**15, 2**19
"""Denominators stay below LIMIT, so that 31-bit values times n are exact in float64, which the CPU kernel uses; below NARROW,
where floats are rounded to if they can be, the whole multiplication fits 32-bit arithmetic."""
_TOLERANCE = Fraction(1, 1000)  # how far rounding a float may move γ, or 1 − γ, relative to itself


def as_ratio(gamma: Any) -> Fraction:
    """The ratio that `gamma` stands for: itself if rational, else the nearest n/d with a small d.

    >>> as_ratio(0.9), as_ratio(1 - 1 / (50 * 1000))
    (Fraction(9, 10), Fraction(49999, 50000))

    Raises:
        TypeError: not a number.
        ValueError: outside [0, 1], not finite, or not within 0.1 % of a ratio with a denominator below `LIMIT`.
    """
    if isinstance(gamma, bool) or not isinstance(gamma, Real):
        raise TypeError(f"gamma must be a number in [0, 1] or a fractions.Fraction; got {gamma!r}.")
    if not math.isfinite(gamma) or not 0 <= float(gamma) <= 1:
        raise ValueError(
            f"gamma must lie in [0, 1]; got {gamma!r}. 0 is a plain residual network, 0.9 the paper's choice, 1 the "
            "Hamiltonian limit."
        )
    exact = Fraction(gamma if isinstance(gamma, Rational) else float(gamma))
    if isinstance(gamma, Rational) and exact.denominator < LIMIT:
        return exact
    for limit in (NARROW, LIMIT):
        ratio = exact.limit_denominator(limit - 1)
        if not isinstance(gamma, Rational) and abs(ratio - exact) <= _TOLERANCE * min(exact, 1 - exact):
            return ratio
    raise ValueError(
        f"gamma = {gamma!r} needs a denominator beyond the limit: ratios n/d must have d < {LIMIT}. The nearest is {ratio}; "
        f"floats may come as near to 0 and 1 as {1 / LIMIT:.2g}."
    )


def as_ratios(gamma: Any, depth: int) -> tuple[Fraction, ...]:
    """One ratio per layer, from one number for all or one number each."""
    if isinstance(gamma, torch.Tensor):
        if gamma.requires_grad:
            raise TypeError(
                "gamma is a fixed ratio and cannot be learned; got a tensor that requires a gradient. Pass float(gamma)."
            )
        gamma = gamma.tolist()
    if not isinstance(gamma, Iterable) or isinstance(gamma, str):
        return (as_ratio(gamma),) * depth
    ratios = tuple(as_ratio(g) for g in gamma)
    if len(ratios) != depth:
        raise ValueError(f"gamma has {len(ratios)} values for {depth} blocks. Pass one number, or one per block.")
    return ratios


def gain(gamma: Fraction) -> Fraction:
    """The factor on f: 1 − γ, and 1 at γ = 1, where f is taken as scaled by 1/(1 − γ) [sander2021, Sec. 3.3]."""
    return 1 - gamma if gamma < 1 else Fraction(1)
