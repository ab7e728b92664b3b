"""Ψ_ε of one number: its smallest real value λ_ε, and its principal inverse on the complex plane.

*Minimum.* On the reals below −1/(4ε), with a = 1/(2ε),

    G_ε(α) = Ψ_ε(−ε α² − 1/(4ε)) = e^{−a} (cos α + a sin α / α),   λ_ε = min_α G_ε(α)

G_ε' = 0 means tan α = a α / (α² + a). The first positive solution α_ε lies in (π, 3π/2), between its limits π (ε → ∞)
and 4.4934… (ε → 0, where tan α = α). At the solutions

    |G_ε(α)| = e^{−a} (α² + a + a²) / √((α² + a)² + a²α²),

which decreases in α, so the first solution is the global minimum. All terms are positive and nothing cancels: the relative error
of λ_ε is that of e^{−a}, even at ε = 1e-3 where λ_ε is about −1e-215.

*Inverse.* On [θ_ε, ∞), with Ψ_ε(θ_ε) = λ_ε, Ψ_ε increases from λ_ε to ∞, so a real λ ≥ λ_ε has one real root there. Off the reals
Ψ_ε' has no zero [sander2021, Lemma 2], so that root continues analytically to the plane without the cut (−∞, λ_ε]. This is the
principal root, with root(λ̄) the conjugate of root(λ). On the cut, root(λ) is the limit from above, with Im θ > 0. For ε = 0
the principal root is the principal logarithm. `Inverse` follows the root along the circle λ_ε + |λ − λ_ε| e^{iφ} from φ = 0,
which stays as far from the branch point as λ itself is, with a tangent predictor and Newton's method at each step.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq

from .inputs import Matrix, as_array, check_eps

TO_ROUNDING: dict[str, Any] = {"xtol": 1e-300, "rtol": 4 * np.finfo(float).eps, "maxiter": 2000}
STEPS = 4  # arcs on a half circle, halved further where Newton does not converge at once


def G(alpha: Matrix, eps: float) -> Matrix:
    """G_ε(α) = e^{−1/2ε} (cos α + sin α / (2ε α)), elementwise, for ε > 0 [sander2021, Sec. 4.3]."""
    array, restore = as_array(alpha, "alpha")
    a = 0.5 / check_eps(eps)
    return restore(math.exp(-a) * np.cos(array) + a * math.exp(-a) * np.sinc(array / math.pi))


def minimiser(eps: float) -> float:
    """α_ε > 0, where G_ε is smallest: the root in (π, 3π/2) of (α² + a) sin α = a α cos α."""
    a = 0.5 / check_eps(eps)
    big, one = (a, 1.0) if a < 1 else (1.0, 1 / a)  # a and 1, divided by max(a, 1)

    def slope(alpha: float) -> float:
        return (one * alpha * alpha + big) * math.sin(alpha) - big * alpha * math.cos(alpha)

    return float(brentq(slope, math.pi, 1.5 * math.pi, **TO_ROUNDING))


def lambda_min(eps: float) -> float:
    """λ_ε = min G_ε for ε > 0, decreasing in ε from 0 (ε → 0) to −1 (ε → ∞) [sander2021, Thm. 1].

    [λ_ε, ∞) is the range of Ψ_ε over the reals. The relative error is below 1e-12 for ε ≥ 1e-3. Below ε ≈ 7e-4 the
    value is smaller than the smallest float64 and comes out as −0.0.

    Example:
        >>> [round(lambda_min(eps), 6) for eps in (0.1, 1.0, 10.0)]
        [-0.010833, -0.613499, -0.951349]
    """
    eps = check_eps(eps)
    a, alpha = 0.5 / eps, minimiser(eps)
    return -math.exp(-a) * (alpha**2 + a + a**2) / math.hypot(alpha**2 + a, a * alpha)


def minimising_parameter(eps: float) -> float:
    """θ_ε = −ε α_ε² − 1/(4ε), the real number with Ψ_ε(θ_ε) = λ_ε."""
    return -eps * minimiser(eps) ** 2 - 0.25 / eps


def psi_scalar(theta: complex, eps: float) -> tuple[complex, complex]:
    """Ψ_ε(θ) and Ψ_ε'(θ) for one complex number, without cancellation between e^{−a} and cosh.

    With s = √(a² + θ/ε): s − a is computed as (θ/ε) / (s + a).
    """
    if eps == 0:
        value = cmath.exp(theta)
        return value, value
    a = 0.5 / eps
    w = a * a + theta / eps
    if abs(w) < 1:
        c = s = ds = 0j
        for n in range(11, -1, -1):
            c = c * w + 1 / math.factorial(2 * n)
            s = s * w + 1 / math.factorial(2 * n + 1)
            ds = ds * w + (n + 1) / math.factorial(2 * n + 3)
        scale = math.exp(-a)
        return scale * (c + a * s), scale * (0.5 * s + a * ds) / eps
    root = cmath.sqrt(w)
    grow, decay = cmath.exp((theta / eps) / (root + a)), cmath.exp(-root - a)
    c, s = 0.5 * (grow + decay), 0.5 * (grow - decay) / root
    return c + a * s, (0.5 * s + 0.5 * a * (c - s) / w) / eps


@dataclass(frozen=True)
class Inverse:
    """The principal inverse of Ψ_ε: Ψ_ε(root(λ)) = λ.

    Example:
        >>> inverse = Inverse.of(0.5)
        >>> theta = inverse.root(-2.0)
        >>> abs(psi_scalar(theta, 0.5)[0] + 2.0) < 1e-14, theta.imag > 0
        (True, True)
    """

    eps: float
    edge: float  # λ_ε, or 0 for ε = 0
    at_edge: float  # θ_ε, or −∞ for ε = 0

    @classmethod
    def of(cls, eps: float) -> Inverse:
        if eps == 0:
            return cls(0.0, 0.0, -math.inf)
        return cls(eps, lambda_min(eps), minimising_parameter(eps))

    def root(self, value: complex) -> complex:
        """The principal θ with Ψ_ε(θ) = value; on the cut (−∞, λ_ε), the one with Im θ > 0."""
        value = complex(value)
        if self.eps == 0:
            return cmath.log(complex(value.real, abs(value.imag))) if value.imag == 0 else cmath.log(value)
        if value.imag < 0:
            return self.root(value.conjugate()).conjugate()
        if value.imag == 0 and value.real >= self.edge:
            return complex(self._real_root(value.real))
        offset = value - self.edge
        radius, angle = abs(offset), cmath.phase(complex(offset.real, abs(offset.imag)))
        theta, at = complex(self._real_root(self.edge + radius)), 0.0
        step = angle / max(1, math.ceil(STEPS * angle / math.pi))
        while at < angle:
            step = min(step, angle - at)
            there = at + step if at + step < angle * (1 - 1e-12) else angle
            target = value if there == angle else self.edge + radius * cmath.exp(1j * there)
            here, slope = psi_scalar(theta, self.eps)
            following = self._newton(theta + (target - here) / slope, target)
            if following is None and step > 1e-4:
                step /= 2
                continue
            assert following is not None, f"lost the root of Ψ_ε = {value} at ε = {self.eps}"
            theta, at = following, there
        return theta

    def _newton(self, theta: complex, target: complex) -> complex | None:
        """Newton from a predicted θ; None where it does not converge at once, so that the step was too long."""
        size = abs(target) + abs(self.edge)
        best, best_error, noise = theta, math.inf, 0.0
        for k in range(12):
            value, slope = psi_scalar(theta, self.eps)
            error = abs(value - target)
            noise = 1e-15 * abs(slope) * (abs(theta) + 0.25 / self.eps)  # the effect on Ψ_ε of rounding θ alone
            if error >= best_error:  # rounding reached, if the error is small
                break
            best, best_error = theta, error
            # The predictor is second order in the arc: a large first miss could lead to another sheet.
            if k == 0 and error > 0.1 * abs(target - self.edge) + 1e-13 * size + noise:
                return None
            if slope == 0:
                break
            theta -= (value - target) / slope
        return best if best_error <= 1e-12 * size + 4 * noise else None

    def _real_root(self, value: float) -> float:
        """The real θ ≥ θ_ε with Ψ_ε(θ) = value ≥ λ_ε."""
        if value <= max(self.edge, psi_scalar(self.at_edge, self.eps)[0].real):
            return self.at_edge
        high = -0.25 / self.eps  # here Ψ_ε is (1 + a) e^{−a}; above, Ψ_ε(εL² + L) ≥ e^L / 2
        if value > psi_scalar(high, self.eps)[0].real:
            log = math.log(value) + 0.7
            high = self.eps * log * log + log
        theta = brentq(lambda t: psi_scalar(t, self.eps)[0].real - value, self.at_edge, high, **TO_ROUNDING)
        polished = self._newton(complex(theta), complex(value))
        return max(self.at_edge, theta if polished is None else polished.real)
