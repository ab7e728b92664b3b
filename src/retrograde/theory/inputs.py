"""Checks of the arguments of this package, and conversion to float64 arrays and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Matrix: TypeAlias = Any  # what a user may pass: np.ndarray, torch.Tensor or nested lists
Restore: TypeAlias = Callable[[Array], Any]

EPS_RANGE = (1e-6, 1e12)  # Ψ_ε loses about 1e-16/ε to rounding; below, ε = 0 differs by no more than O(ε)


def as_array(values: Matrix, name: str) -> tuple[Array, Restore]:
    """`values` as a finite float64 array, and the function that turns a result back into the kind given."""
    restore: Restore = np.asarray
    if isinstance(values, torch.Tensor):
        if values.requires_grad:
            raise TypeError(f"{name} requires grad, but theory/ is not differentiable: pass {name}.detach()")
        device = values.device

        def to_tensor(result: Array) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(result)).to(device)

        restore = to_tensor
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.double()
        values = values.cpu().numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected real numbers (float or integer)")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has {int((~np.isfinite(array)).sum())} NaN or infinite entries: all must be finite")
    return array, restore


def as_matrix(values: Matrix, name: str) -> tuple[Array, Restore]:
    """The same for a square matrix (d, d) with d ≥ 1."""
    array, restore = as_array(values, name)
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise ValueError(f"{name} has shape {array.shape}: expected a square matrix (d, d)")
    if array.shape[0] == 0:
        raise ValueError(f"{name} is empty: expected a square matrix (d, d) with d ≥ 1")
    return array, restore


def as_vector(values: Matrix, name: str) -> Array:
    """`values` as a finite float64 vector (d,) with d ≥ 1."""
    array, _ = as_array(values, name)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} has shape {array.shape}: expected a vector (d,) with d ≥ 1")
    return array


def check_real(
    value: float, name: str, expected: str = "", holds: Callable[[float], bool] = lambda value: True
) -> float:
    """`value` as a finite float for which `holds`, which `expected` says in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected a real number")
    if not math.isfinite(value):
        raise ValueError(f"{name} = {value}: expected a finite number")
    if not holds(value):
        raise ValueError(f"{name} = {value}: expected {expected}")
    return float(value)


def check_eps(eps: float, *, zero: str = "") -> float:
    """ε as a float > 0. `zero` says what ε = 0 means to the caller; without it ε = 0 is refused."""
    low, high = EPS_RANGE
    allowed = f"{f'eps = 0 ({zero}) or ' if zero else ''}{low:g} ≤ eps ≤ {high:g}; from γ it is eps = 1/(1 − γ)"
    return check_real(eps, "eps", allowed, lambda eps: low <= eps <= high or bool(zero and eps == 0))
