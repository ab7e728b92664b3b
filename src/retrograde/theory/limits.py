"""The two ends of ε: a second-order model tends to a first-order one, and to a frictionless one.

    ε ẍ + ẋ = f(x)        →  ẋ = f(x)   as ε → 0, uniformly on [0, T], whatever v₀            [sander2021, Prop. 2]
    ẍ + ẋ/ε = f(x)        →  ẍ = f(x)   as ε → ∞, uniformly on [0, T]                        [sander2021, App. B.1]

The paper proves that they converge. The distances computed here also show how fast: like ε, and like 1/ε.
All four equations are solved by the same implicit Runge–Kutta method (Radau), since the first is stiff for small ε.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.integrate import solve_ivp

from retrograde.theory.inputs import Array, Matrix, as_array, check_eps, check_real

Field = Callable[[Array], Array]
ACCURACY = 1e-10  # relative and absolute tolerance of the solver


def first_order_flow(f: Field, x0: Matrix, times: Matrix) -> Array:
    """x(t) of ẋ = f(x), x(0) = x₀, at the given times.

    Args:
        f: maps an array (d,) to an array (d,).
        x0: start, (d,).
        times: increasing times ≥ 0, (n,).

    Shape:
        → (n, d)

    Example:
        >>> bool(abs(first_order_flow(lambda x: -x, [1.0], [1.0])[0, 0] - np.exp(-1)) < 1e-9)
        True
    """
    x0 = _vector(x0, "x0")
    return _solve(lambda _, x: np.asarray(f(x), dtype=float), x0, _times(times))


def second_order_flow(f: Field, x0: Matrix, v0: Matrix, eps: float, times: Matrix) -> Array:
    """x(t) of ε ẍ + ẋ = f(x), (x, ẋ)(0) = (x₀, v₀). Shape (n, d).

    Example:
        >>> x = second_order_flow(lambda x: -x / 2, [3.0], [-1.5], eps=1.0, times=[np.pi])
        >>> bool(abs(x[0, 0]) < 1e-9)  # the crossing example
        True
    """
    eps = check_eps(eps)
    return _solve_pair(f, x0, v0, times, lambda v, push: (push - v) / eps)


def damped_flow(f: Field, x0: Matrix, v0: Matrix, eps: float, times: Matrix) -> Array:
    """x(t) of ẍ + ẋ/ε = f(x), (x, ẋ)(0) = (x₀, v₀): the scaling in which ε → ∞ has a limit. Shape (n, d)."""
    eps = check_eps(eps)
    return _solve_pair(f, x0, v0, times, lambda v, push: push - v / eps)


def frictionless_flow(f: Field, x0: Matrix, v0: Matrix, times: Matrix) -> Array:
    """x(t) of ẍ = f(x), (x, ẋ)(0) = (x₀, v₀). Shape (n, d).

    Example:
        >>> x = frictionless_flow(lambda x: -x, [1.0], [0.0], [np.pi])
        >>> bool(abs(x[0, 0] + 1) < 1e-8)
        True
    """
    return _solve_pair(f, x0, v0, times, lambda v, push: push)


def first_order_gap(f: Field, x0: Matrix, v0: Matrix, eps: float, horizon: float = 1.0, points: int = 65) -> float:
    """max over [0, T] of ‖x_ε(t) − x*(t)‖∞, with x* of the first-order model: → 0 like ε (Prop. 2).

    Example:
        >>> gaps = [first_order_gap(np.sin, [1.0], [0.0], eps) for eps in (1e-2, 1e-3)]
        >>> bool(8 < gaps[0] / gaps[1] < 12)
        True
    """
    times = _grid(horizon, points)
    gap = second_order_flow(f, x0, v0, eps, times) - first_order_flow(f, x0, times)
    return float(np.abs(gap).max())


def frictionless_gap(f: Field, x0: Matrix, v0: Matrix, eps: float, horizon: float = 1.0, points: int = 65) -> float:
    """max over [0, T] of ‖x_ε(t) − x*(t)‖∞, with x_ε of ẍ + ẋ/ε = f and x* of ẍ = f: → 0 like 1/ε.

    Example:
        >>> gaps = [frictionless_gap(np.sin, [1.0], [1.0], eps) for eps in (1e2, 1e3)]
        >>> bool(9 < gaps[0] / gaps[1] < 11)
        True
    """
    times = _grid(horizon, points)
    gap = damped_flow(f, x0, v0, eps, times) - frictionless_flow(f, x0, v0, times)
    return float(np.abs(gap).max())


def _solve_pair(f: Field, x0: Matrix, v0: Matrix, times: Matrix, accelerate: Callable[[Array, Array], Array]) -> Array:
    x0, v0 = _vector(x0, "x0"), _vector(v0, "v0")
    if x0.shape != v0.shape:
        raise ValueError(f"x0 has shape {x0.shape} and v0 {v0.shape}: expected equal shapes (d,)")
    d = len(x0)

    def field(_: float, state: Array) -> Array:
        x, v = state[:d], state[d:]
        return np.concatenate([v, accelerate(v, np.asarray(f(x), dtype=float))])

    return _solve(field, np.concatenate([x0, v0]), _times(times))[:, :d]


def _solve(field: Callable[[float, Array], Array], start: Array, times: Array) -> Array:
    span = (0.0, max(float(times[-1]), 1e-300))
    solution = solve_ivp(field, span, start, method="Radau", t_eval=times, rtol=ACCURACY, atol=ACCURACY)
    if not solution.success:
        raise ArithmeticError(f"the ODE was not solved up to t = {times[-1]}: {solution.message}")
    return np.asarray(solution.y.T)


def _vector(values: Matrix, name: str) -> Array:
    array, _ = as_array(values, name)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} has shape {array.shape}: expected a vector (d,) with d ≥ 1")
    return array


def _times(values: Matrix) -> Array:
    times = _vector(values, "times")
    if times[0] < 0 or (np.diff(times) <= 0).any():
        raise ValueError(f"times = {times}: expected increasing times ≥ 0")
    return times


def _grid(horizon: float, points: int) -> Array:
    if (horizon := check_real(horizon, "horizon")) <= 0 or points < 2:
        raise ValueError(f"horizon = {horizon}, points = {points}: expected horizon > 0 and points ≥ 2")
    return np.linspace(0.0, horizon, points)
