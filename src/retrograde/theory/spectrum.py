"""λ_ε, the smallest real eigenvalue that one real parameter can give.

    G_ε(α) = Ψ_ε(−ε α² − 1/(4ε)) = e^{−a} (cos α + a sin α / α),   a = 1/(2ε),   λ_ε = min_α G_ε(α)

G_ε' = 0 means tan α = a α / (α² + a). The first positive solution α_ε lies in (π, 3π/2), between its limits π (ε → ∞)
and 4.4934… (ε → 0, where tan α = α). At the solutions

    |G_ε(α)| = e^{−a} (α² + a + a²) / √((α² + a)² + a²α²),

which decreases in α: the first is the global minimum, and no other is as low. All terms are positive, so λ_ε is computed
from it without cancellation: its relative error is that of e^{−a}, even at ε = 1e-3 where λ_ε is about −1e-215.
"""

from __future__ import annotations

import math

import numpy as np

from retrograde.theory.inputs import Matrix, as_array, check_eps


def G(alpha: Matrix, eps: float) -> Matrix:
    """G_ε(α) = e^{−1/2ε} (cos α + sin α / (2ε α)), elementwise [sander2021, Sec. 4.3].

    Args:
        alpha: real numbers of any shape. G_ε is even, and G_ε(0) = e^{−1/2ε} (1 + 1/2ε).
        eps: ε > 0.

    Raises:
        ValueError: alpha is not finite or ε ≤ 0.

    Example:
        >>> import math
        >>> float(G(math.pi, eps=0.5)) == -math.exp(-1)
        True
    """
    array, restore = as_array(alpha, "alpha")
    a = 0.5 / check_eps(eps)
    return restore(math.exp(-a) * np.cos(array) + a * math.exp(-a) * np.sinc(array / math.pi))


def minimiser(eps: float) -> float:
    """α_ε > 0, where G_ε is smallest: the root in (π, 3π/2) of (α² + a) sin α = a α cos α, by safeguarded Newton.

    The parameter that reaches λ_ε is θ = −ε α_ε² − 1/(4ε).

    Example:
        >>> math.pi < minimiser(1e6) < minimiser(1.0) < minimiser(1e-6) < 4.4935
        True
    """
    a = 0.5 / check_eps(eps)
    big, one = (a, 1.0) if a < 1 else (1.0, 1 / a)  # a and 1, divided by max(a, 1)
    low, high = math.pi, 1.5 * math.pi
    alpha = 0.5 * (low + high)
    for _ in range(100):
        sin, cos = math.sin(alpha), math.cos(alpha)
        value = big * alpha * cos - (one * alpha * alpha + big) * sin  # − at π, + at 3π/2
        low, high = (alpha, high) if value < 0 else (low, alpha)
        slope = -alpha * (2 * one + big) * sin - one * alpha * alpha * cos
        step = alpha - value / slope if slope else low
        if not low <= step <= high:
            step = 0.5 * (low + high)
        if abs(step - alpha) <= 2e-16 * alpha:
            return step
        alpha = step
    return alpha


def lambda_min(eps: float) -> float:
    """λ_ε = min G_ε, decreasing in ε from 0 (ε → 0) to −1 (ε → ∞) [sander2021, Thm. 1].

    [λ_ε, ∞) is the range of Ψ_ε over the reals. The relative error is below 1e-12 for ε ≥ 1e-3. Below ε ≈ 7e-4 the
    value is smaller than the smallest float64 and comes out as −0.0.

    Raises:
        ValueError: ε ≤ 0 (the exponential has no minimum).

    Example:
        >>> [round(lambda_min(eps), 6) for eps in (0.1, 1.0, 10.0)]
        [-0.010833, -0.613499, -0.951349]
    """
    eps = check_eps(eps)
    a, alpha = 0.5 / eps, minimiser(eps)
    return -math.exp(-a) * (alpha**2 + a + a**2) / math.hypot(alpha**2 + a, a * alpha)


def minimising_parameter(eps: float) -> float:
    """θ_ε = −ε α_ε² − 1/(4ε), the real number with Ψ_ε(θ_ε) = λ_ε. Ψ_ε increases on [θ_ε, ∞).

    Example:
        >>> from retrograde.theory import psi
        >>> abs(psi([[minimising_parameter(0.5)]], 0.5).item() / lambda_min(0.5) - 1) < 1e-14
        True
    """
    return -eps * minimiser(eps) ** 2 - 0.25 / eps
