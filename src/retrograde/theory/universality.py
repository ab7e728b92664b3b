"""What second-order models can do beyond first-order ones, and what they cannot: the paper's constructions.

    f̂ = ε (∂ₓf · f + ∂ₜf) + f     every solution of ẋ = f solves ε ẍ + ẋ = f̂ with ẋ(0) = f(x₀)               [Prop. 3]
    v₀ = (h(x₀) − x₀) / (ε (1 − e^{−1/ε}))   makes ε ẍ + ẋ = 0 represent any h                              [App. B.2]
    h(x₀) ≤ −x₀ and h(−x₀) ≥ x₀   for some x₀ > 0: no autonomous f represents h with v₀ = 0, d = 1          [App. B.3]
    θ = −ε π² − 1/(4ε)            represents x ↦ −e^{−1/2ε} x with v₀ = 0                                   [App. B.4]

All in [sander2021]. ∂ₜf stands for the paper's ∂_θ f · θ̇: f is taken as a function of time and state. The paper states
App. B.2 for ε = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from retrograde.theory.inputs import check_eps, check_real

TimeField = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def embed_first_order(f: TimeField, eps: float) -> TimeField:
    """f̂ = ε (∂ₓf · f + ∂ₜf) + f, whose second-order model has every solution of ẋ = f(t, x) among its own.

    Start it at ẋ(0) = f(0, x₀). For f(x) = θx it is f̂(x) = (εθ² + θ) x.

    Args:
        f: maps a time (a tensor of shape ()) and a state (...) to a tensor like the state; differentiable by torch.
        eps: ε ≥ 0; f̂ = f for ε = 0.

    Raises:
        ValueError: ε < 0.

    Example:
        >>> f_hat = embed_first_order(lambda t, x: t * x, eps=0.5)
        >>> float(f_hat(torch.tensor(2.0), torch.tensor(3.0)))  # 0.5·(2·6 + 3) + 6
        13.5
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

    x(t) = x₀ + ε (1 − e^{−t/ε}) v₀.

    Args:
        h: any map whose values can be subtracted from and divided (arrays, tensors, numbers).
        eps: ε > 0.

    Raises:
        ValueError: ε ≤ 0.

    Example:
        >>> v0 = universal_velocity(lambda x: -(x**3))
        >>> round(2.0 + (1 - math.exp(-1)) * v0(2.0), 12)
        -8.0
    """
    reach = -(eps := check_eps(eps)) * math.expm1(-1 / eps)
    return lambda x0: (h(x0) - x0) / reach


def obstruction(h: Callable[[float], float], points: Iterable[float]) -> float | None:
    """A point x₀ > 0 among `points` with h(x₀) ≤ −x₀ and h(−x₀) ≥ x₀, or None.

    Such a point proves that no f at all, linear or not, makes h the map of ε ẍ + ẋ = f(x), ẋ(0) = 0, at time 1 (d = 1):
    the energy ẋ²/2 + E would have to fall on the way from x₀ to −x₀, and again from −x₀ to x₀. For h(x) = λx with
    λ ≤ −1 every x₀ > 0 is one.

    Raises:
        ValueError: a point is not > 0.

    Example:
        >>> obstruction(lambda x: -x, [0.5, 1.0]), obstruction(lambda x: -0.9 * x, [0.5, 1.0])
        (0.5, None)
    """
    for point in points:
        if (x0 := check_real(point, "point")) <= 0:
            raise ValueError(f"point = {x0}: expected x₀ > 0 (−x₀ is looked at with it)")
        if h(x0) <= -x0 and h(-x0) >= x0:
            return x0
    return None


def sign_flip(eps: float) -> tuple[float, float]:
    """(θ, −e^{−1/2ε}): a real θ, and the negative number Ψ_ε(θ) that no first-order model reaches.

    θ = −ε π² − 1/(4ε), where the model oscillates by half a turn in unit time.

    Example:
        >>> from retrograde.theory import psi
        >>> theta, value = sign_flip(2.0)
        >>> abs(psi([[theta]], 2.0).item() - value) < 1e-15
        True
    """
    eps = check_eps(eps)
    return -eps * math.pi**2 - 0.25 / eps, -math.exp(-0.5 / eps)


def crossing(x0: Any, t: float) -> Any:
    """x₀ e^{−t/2} cos(t/2), which solves ẍ + ẋ = −x/2 from (x₀, −x₀/2): every trajectory passes 0 at t = π.

    So x₀ ↦ x(t) need not be one to one, as the flow of a first-order model is.

    Example:
        >>> abs(crossing(5.0, math.pi)) < 1e-15
        True
    """
    return x0 * (math.exp(-t / 2) * math.cos(t / 2))


def negative_pair(lam: float) -> torch.Tensor:
    """diag(−1, −λ), λ > 0, λ ≠ 1: orientation-preserving, yet no exponential [sander2021, App. B.7].

    Being in GL⁺ is not enough for a first-order model. At ε > 0 its multiples up to |λ_ε| / max(1, λ) can be
    represented.

    Raises:
        ValueError: λ ≤ 0, or λ = 1 (where the pair is representable).

    Example:
        >>> from retrograde.theory import is_representable, largest_multiple
        >>> A = negative_pair(2.0)
        >>> float(torch.linalg.det(A)), is_representable(A, eps=0.0), round(largest_multiple(A, eps=1.0), 4)
        (2.0, False, 0.3067)
    """
    if (lam := check_real(lam, "lam")) <= 0 or lam == 1:
        raise ValueError(f"lam = {lam}: expected lam > 0 and lam ≠ 1")
    return torch.diag(torch.tensor([-1.0, -lam], dtype=torch.float64))
