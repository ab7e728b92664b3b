"""The paper's other propositions: fixed points, the two ends of ε, and what second-order models can do [sander2021].

docs/theory.md has examples.

*Fixed points.* On the state (v, x), with A, B the Jacobians of φ, ψ (or A that of f) at the fixed point,

    RevNet     v' = v + φ(x),  x' = x + ψ(v')            J(A, B) = [[I, A], [B, I + BA]]                      [Prop. 1]
    Momentum   v' = γv + (1−γ)f(x),  x' = x + v'          M(A) = [[γI, (1−γ)A], [γI, I + (1−γ)A]]

The eigenvalues λ of J come from the eigenvalues μ of AB, those of M from the eigenvalues μ of A:

    RevNet     λ² − (2 + μ) λ + 1 = 0                    one root has |λ| ≥ 1, and λ = 1 only for μ = 0
    Momentum   λ² − (1 + γ + (1−γ) μ) λ + γ = 0          both roots have |λ| < 1 exactly when
                                                         ((1 + γ + (1−γ) Re μ) / (1+γ))² + (Im μ)² < 1

So a RevNet's fixed points never attract and a Momentum ResNet's can. The last line is not in the paper: λ ↦ λ + γ/λ maps the
circles between |λ| = √γ and |λ| = 1 to ellipses, the largest with half axes 1+γ and 1−γ.

*The two ends of ε.* The paper proves convergence; the gaps computed here also show how fast: like ε, and like 1/ε.

    ε ẍ + ẋ = f(x)        →  ẋ = f(x)   as ε → 0, uniformly on [0, T], whatever v₀                            [Prop. 2]
    ẍ + ẋ/ε = f(x)        →  ẍ = f(x)   as ε → ∞, uniformly on [0, T]                                        [App. B.1]

*Second order beyond first order.* ∂ₜf stands for the paper's ∂_θ f · θ̇: f is taken as a function of time and state.

    f̂ = ε (∂ₓf · f + ∂ₜf) + f     every solution of ẋ = f solves ε ẍ + ẋ = f̂ with ẋ(0) = f(x₀)               [Prop. 3]
    v₀ = (h(x₀) − x₀) / (ε (1 − e^{−1/ε}))   makes ε ẍ + ẋ = 0 represent any h (in the paper ε = 1)         [App. B.2]
    h(x₀) ≤ −x₀ and h(−x₀) ≥ x₀   for some x₀ > 0: no autonomous f represents h with v₀ = 0, d = 1          [App. B.3]
    θ = −ε π² − 1/(4ε)            represents x ↦ −e^{−1/2ε} x with v₀ = 0                                   [App. B.4]
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp

from .inputs import Array, Matrix, as_matrix, as_vector, check_eps, check_real

Field = Callable[[Array], Array]
TimeField = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ACCURACY = 1e-10  # relative and absolute tolerance of the ODE solver


def revnet_jacobian(A: Matrix, B: Matrix) -> Matrix:
    """J(A, B), the (2d, 2d) Jacobian of a RevNet layer at a fixed point, for the Jacobians A of φ and B of ψ."""
    a, restore = as_matrix(A, "A")
    b = _partner(a, B)
    identity = np.eye(len(a))
    return restore(np.block([[identity, a], [b, identity + b @ a]]))


def revnet_eigenvalue(A: Matrix, B: Matrix) -> complex:
    """An eigenvalue λ of J(A, B) with |λ| ≥ 1 and λ ≠ 1, for invertible A and B.

    λ is the larger root of λ² − (2 + μ) λ + 1 = 0 for the largest eigenvalue μ of AB, so |λ − 1|² = |μ| |λ| > 0.
    """
    a, _ = as_matrix(A, "A")
    b = _partner(a, B)
    for name, matrix in (("A", a), ("B", b)):
        if (rank := np.linalg.matrix_rank(matrix)) < len(a):
            raise ValueError(f"{name} has rank {rank} of {len(a)}: Prop. 1 is about invertible A and B")
    mu = complex(max(np.linalg.eigvals(a @ b), key=abs))
    # (2+μ)² − 4 written as μ(4+μ): exact where μ is small.
    half, root = (2 + mu) / 2, cmath.sqrt(mu * (4 + mu)) / 2
    return max(half - root, half + root, key=abs)


def momentum_jacobian(A: Matrix, gamma: float) -> Matrix:
    """M(A), the (2d, 2d) Jacobian of a momentum layer at a fixed point, for the Jacobian A of f and 0 ≤ γ ≤ 1."""
    a, restore = as_matrix(A, "A")
    gamma = _check_gamma(gamma)
    identity, push = np.eye(len(a)), (1 - gamma) * a
    return restore(np.block([[gamma * identity, push], [gamma * identity, identity + push]]))


def is_attracting(A: Matrix, gamma: float) -> bool:
    """Whether every eigenvalue of M(A) is inside the unit circle, by the ellipse above. Never for γ = 1."""
    a, _ = as_matrix(A, "A")
    gamma = _check_gamma(gamma)
    mu = np.linalg.eigvals(a)
    inside = ((1 + gamma + (1 - gamma) * mu.real) / (1 + gamma)) ** 2 + mu.imag**2 < 1
    return gamma < 1 and bool(inside.all())


def spectral_radius(A: Matrix) -> float:
    """max |λ| over the eigenvalues of A: how fast iterations leave or reach a fixed point with Jacobian A."""
    return float(np.abs(np.linalg.eigvals(as_matrix(A, "A")[0])).max())


def _partner(a: Array, B: Matrix) -> Array:
    b, _ = as_matrix(B, "B")
    if a.shape != b.shape:
        raise ValueError(f"A has shape {a.shape} and B {b.shape}: expected equal shapes (d, d)")
    return b


def _check_gamma(gamma: float) -> float:
    return check_real(gamma, "gamma", "0 ≤ gamma ≤ 1", lambda gamma: 0 <= gamma <= 1)


def first_order_flow(f: Field, x0: Matrix, times: Matrix) -> Array:
    """x(t) of ẋ = f(x), x(0) = x₀, at the given times (n,), increasing from ≥ 0: an array (n, d)."""
    return _solve(lambda _, x: np.asarray(f(x), dtype=float), as_vector(x0, "x0"), times)


def second_order_flow(f: Field, x0: Matrix, v0: Matrix, eps: float, times: Matrix) -> Array:
    """x(t) of ε ẍ + ẋ = f(x), (x, ẋ)(0) = (x₀, v₀): an array (n, d)."""
    eps = check_eps(eps)
    return _solve_pair(f, x0, v0, times, lambda v, push: (push - v) / eps)


def damped_flow(f: Field, x0: Matrix, v0: Matrix, eps: float, times: Matrix) -> Array:
    """x(t) of ẍ + ẋ/ε = f(x), (x, ẋ)(0) = (x₀, v₀): the scaling in which ε → ∞ has a limit. An array (n, d)."""
    eps = check_eps(eps)
    return _solve_pair(f, x0, v0, times, lambda v, push: push - v / eps)


def frictionless_flow(f: Field, x0: Matrix, v0: Matrix, times: Matrix) -> Array:
    """x(t) of ẍ = f(x), (x, ẋ)(0) = (x₀, v₀): an array (n, d)."""
    return _solve_pair(f, x0, v0, times, lambda v, push: push)


def first_order_gap(f: Field, x0: Matrix, v0: Matrix, eps: float, horizon: float = 1.0, points: int = 65) -> float:
    """max over [0, T] of ‖x_ε(t) − x*(t)‖∞, with x* of the first-order model: → 0 like ε (Prop. 2)."""
    times = _grid(horizon, points)
    return _apart(second_order_flow(f, x0, v0, eps, times), first_order_flow(f, x0, times))


def frictionless_gap(f: Field, x0: Matrix, v0: Matrix, eps: float, horizon: float = 1.0, points: int = 65) -> float:
    """max over [0, T] of ‖x_ε(t) − x*(t)‖∞, with x_ε of ẍ + ẋ/ε = f and x* of ẍ = f: → 0 like 1/ε."""
    times = _grid(horizon, points)
    return _apart(damped_flow(f, x0, v0, eps, times), frictionless_flow(f, x0, v0, times))


def _apart(a: Array, b: Array) -> float:
    return float(np.abs(a - b).max())


def _solve_pair(f: Field, x0: Matrix, v0: Matrix, times: Matrix, accelerate: Callable[[Array, Array], Array]) -> Array:
    x0, v0 = as_vector(x0, "x0"), as_vector(v0, "v0")
    if x0.shape != v0.shape:
        raise ValueError(f"x0 has shape {x0.shape} and v0 {v0.shape}: expected equal shapes (d,)")
    d = len(x0)

    def field(_: float, state: Array) -> Array:
        x, v = state[:d], state[d:]
        return np.concatenate([v, accelerate(v, np.asarray(f(x), dtype=float))])

    return _solve(field, np.concatenate([x0, v0]), times)[:, :d]


def _solve(field: Callable[[float, Array], Array], start: Array, times: Matrix) -> Array:
    """The state at the given times. The method is implicit (Radau), since the second-order model is stiff for small ε."""
    times = as_vector(times, "times")
    if times[0] < 0 or (np.diff(times) <= 0).any():
        raise ValueError(f"times = {times}: expected increasing times ≥ 0")
    span = (0.0, max(float(times[-1]), 1e-300))
    solution = solve_ivp(field, span, start, method="Radau", t_eval=times, rtol=ACCURACY, atol=ACCURACY)
    if not solution.success:
        raise ArithmeticError(f"the ODE was not solved up to t = {times[-1]}: {solution.message}")
    return np.asarray(solution.y.T)


def _grid(horizon: float, points: int) -> Array:
    points = int(check_real(points, "points", "points ≥ 2", lambda points: points >= 2))
    return np.linspace(0.0, check_real(horizon, "horizon", "horizon > 0", lambda horizon: horizon > 0), points)


def embed_first_order(f: TimeField, eps: float) -> TimeField:
    """f̂ = ε (∂ₓf · f + ∂ₜf) + f, whose second-order model has every solution of ẋ = f(t, x) among its own.

    Start it at ẋ(0) = f(0, x₀). For f(x) = θx it is f̂(x) = (εθ² + θ) x. For ε = 0 it is f itself. f maps a time (a tensor
    of shape ()) and a state to a tensor like the state, and torch can differentiate it.
    """
    eps = check_eps(eps, zero="f itself")

    def f_hat(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        speed = f(t, x)
        # The derivative of f along the solution: direction 1 in time and f in state.
        _, acceleration = torch.autograd.functional.jvp(
            f, (t, x), (torch.ones_like(t), speed), create_graph=speed.requires_grad
        )
        return eps * acceleration + speed

    return f_hat


def universal_velocity(h: Callable[[Any], Any], eps: float = 1.0) -> Callable[[Any], Any]:
    """The map x₀ ↦ v₀ with which ε ẍ + ẋ = 0 carries x₀ to h(x₀) at time 1: with v₀ free, anything can be represented.

    x(t) = x₀ + ε (1 − e^{−t/ε}) v₀. The values of h are arrays, tensors or numbers.
    """
    reach = -(eps := check_eps(eps)) * math.expm1(-1 / eps)
    return lambda x0: (h(x0) - x0) / reach


def obstruction(h: Callable[[float], float], points: Iterable[float]) -> float | None:
    """A point x₀ > 0 among `points` with h(x₀) ≤ −x₀ and h(−x₀) ≥ x₀, or None.

    Such a point proves that no f at all, linear or not, makes h the map of ε ẍ + ẋ = f(x), ẋ(0) = 0, at time 1 (d = 1):
    the energy ẋ²/2 + E would have to fall on the way from x₀ to −x₀, and again from −x₀ to x₀. For h(x) = λx with
    λ ≤ −1 every x₀ > 0 is one.
    """
    for point in points:
        x0 = check_real(point, "point", "x₀ > 0 (−x₀ is looked at with it)", lambda x0: x0 > 0)
        if h(x0) <= -x0 and h(-x0) >= x0:
            return x0
    return None


def sign_flip(eps: float) -> tuple[float, float]:
    """(θ, −e^{−1/2ε}): a real θ, and the negative number Ψ_ε(θ) that no first-order model reaches.

    θ = −ε π² − 1/(4ε), where the model oscillates by half a turn in unit time.
    """
    eps = check_eps(eps)
    return -eps * math.pi**2 - 0.25 / eps, -math.exp(-0.5 / eps)


def crossing(x0: Any, t: float) -> Any:
    """x₀ e^{−t/2} cos(t/2), which solves ẍ + ẋ = −x/2 from (x₀, −x₀/2): every trajectory passes 0 at t = π.

    So x₀ ↦ x(t) need not be one to one, as the flow of a first-order model is.
    """
    return x0 * (math.exp(-t / 2) * math.cos(t / 2))


def negative_pair(lam: float) -> torch.Tensor:
    """diag(−1, −λ), λ > 0, λ ≠ 1: it preserves orientation and yet is no exponential [sander2021, App. B.7].

    Being in GL⁺ is not enough for a first-order model. At ε > 0 its multiples up to |λ_ε| / max(1, λ) can be
    represented.
    """
    lam = check_real(lam, "lam", "lam > 0 and lam ≠ 1", lambda lam: lam > 0 and lam != 1)
    return torch.diag(torch.tensor([-1.0, -lam], dtype=torch.float64))
