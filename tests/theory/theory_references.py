"""Ψ_ε and λ_ε in high precision (mpmath), written from the paper's formulas and sharing nothing with the library."""

from __future__ import annotations

import mpmath as mp
import numpy as np


def psi_ref(theta: np.ndarray, eps: float, digits: int = 40) -> mp.matrix:
    """e^{−1/2ε} Σ (1/(2n)! + 1/(2ε(2n+1)!)) (θ/ε + I/4ε²)ⁿ, summed with enough digits to survive its cancellation."""
    size = float(np.abs(theta).sum() / eps + 0.25 / eps**2)
    with mp.workdps(digits + int(size**0.5)):
        e = mp.mpf(eps)
        w = mp.matrix(theta.tolist()) / e + mp.eye(len(theta)) / (4 * e * e)
        total, power, n = mp.zeros(len(theta)), mp.eye(len(theta)), 0
        while True:
            term = power * (1 / mp.factorial(2 * n) + 1 / (2 * e * mp.factorial(2 * n + 1)))
            total += term
            if n > size**0.5 and mp.mnorm(term, 1) < mp.mpf(10) ** (-mp.mp.dps - 5):
                return total * mp.exp(-1 / (2 * e))
            power, n = power * w, n + 1


def relative_error(found: np.ndarray, reference: mp.matrix) -> float:
    """‖found − reference‖ / ‖reference‖ (Frobenius)."""
    gap = mp.matrix(found.tolist()) - reference
    return float(mp.mnorm(gap, "f") / mp.mnorm(reference, "f"))


def lambda_ref(eps: float) -> mp.mpf:
    """min over α of e^{−1/2ε} (cos α + sin α / 2εα), by golden-section search in 60 digits: no derivative is used."""
    with mp.workdps(60):
        a = 1 / (2 * mp.mpf(eps))
        low, high = mp.pi, 3 * mp.pi / 2
        ratio = (mp.sqrt(5) - 1) / 2

        def g(alpha: mp.mpf) -> mp.mpf:
            return mp.cos(alpha) + a * mp.sin(alpha) / alpha

        inner, outer = high - ratio * (high - low), low + ratio * (high - low)
        while high - low > mp.mpf(10) ** -20:  # the minimum is flat: 20 digits of α are 40 of λ
            if g(inner) < g(outer):
                high, outer = outer, inner
                inner = high - ratio * (high - low)
            else:
                low, inner = inner, outer
                outer = low + ratio * (high - low)
        return g((low + high) / 2) * mp.exp(-a)
