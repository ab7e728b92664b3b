"""The linear second-order model and the map that it defines at time 1.

    ε ẍ + ẋ = θ x,   x(t) = Φ_x(t) x₀ + Φ_v(t) v₀,   Ψ_ε(θ) = Φ_x(1)                    [sander2021, Prop. 4]

With a = 1/(2ε) and W = θ/ε + a² I, the damped pair

    C(t) = e^{−at} cosh(t √W),   S(t) = e^{−at} sinh(t √W) / √W

gives Φ_x = C + a S and Φ_v = S (both are even in √W: no square root is taken). They are evaluated like a matrix
exponential, by scaling and squaring: a Taylor polynomial at a small step h, then

    C(2h) = C(h)² + W S(h)²,   S(2h) = 2 C(h) S(h).

These are the squarings of the exponential of the 2d×2d block system, on d×d blocks that commute. Every squaring carries the
factor e^{−at}, so neither it nor cosh leaves the range of float64 (at ε = 1e-3, e^{−a} is 1e-217). The paper's form, e^{−a}
times a power series, overflows there. The double-angle formula 2C² − I is not used: its error grows by 4 per doubling, that of
the pair by 2. ε = 0 is the first-order model, Ψ_0 = exp.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import expm, schur

from .inputs import Array, Matrix, as_matrix, check_eps, check_real

TAYLOR = 11  # terms; 1/22! < 1e-21 bounds the remainder for a step with norm ≤ 1


def psi(theta: Matrix, eps: float) -> Matrix:
    """Ψ_ε(θ), the linear map x₀ ↦ x(1) of ε ẍ + ẋ = θ x with ẋ(0) = 0. Its inverse is `represent`.

    Ψ_ε(θ) = e^{−1/2ε} Σ_n (1/(2n)! + 1/(2ε(2n+1)!)) (θ/ε + I/4ε²)ⁿ, and Ψ_0(θ) = exp θ [sander2021, Prop. 4].

    Args:
        theta: real matrix (d, d).
        eps: ε = 1/(1−γ) ≥ 0.

    Raises:
        OverflowError: the result exceeds float64.

    Example:
        >>> import numpy as np
        >>> float(psi(np.array([[0.0]]), eps=0.5)[0, 0])
        1.0
        >>> theta = np.array([[0.0, 1.0], [-1.0, 0.0]])
        >>> np.round(psi(theta, eps=0.0), 4)  # ε = 0: the rotation by one radian
        array([[ 0.5403,  0.8415],
               [-0.8415,  0.5403]])
    """
    return linear_flow(theta, eps)[0]


def linear_flow(theta: Matrix, eps: float, t: float = 1.0) -> tuple[Matrix, Matrix]:
    """The matrices (Φ_x, Φ_v) with x(t) = Φ_x x₀ + Φ_v v₀, for t ≥ 0. For ε = 0, Φ_v = 0. Arguments as for `psi`."""
    matrix, restore = as_matrix(theta, "theta")
    eps = check_eps(eps, zero="the first-order model, Ψ_0 = exp")
    t = check_real(t, "t", "t ≥ 0", lambda t: t >= 0)
    # Triangular form keeps a large off-diagonal part out of the diagonal while squaring. Real blocks keep reality.
    upper, q = schur(matrix, output="real")
    on_x, on_v = evaluate(upper, eps, t)
    if not (np.isfinite(on_x).all() and np.isfinite(on_v).all()):
        raise OverflowError(f"the flow of theta (norm {np.linalg.norm(matrix):.3g}) at t = {t} exceeds float64")
    return restore(q @ on_x @ q.T), restore(q @ on_v @ q.T)


def evaluate(theta: Array, eps: float, t: float = 1.0) -> tuple[Array, Array]:
    """(Φ_x, Φ_v) for a batch of real or complex matrices (..., d, d), unchecked. Overflow gives inf or NaN."""
    if eps == 0:
        with np.errstate(over="ignore", invalid="ignore"):
            return expm(t * theta), np.zeros_like(theta)
    a = 0.5 / eps
    identity = np.eye(theta.shape[-1])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        w = theta / eps + a * a * identity
        doublings = max(0, math.ceil(math.log2(t * math.sqrt(_growth(w)) + 1e-300)))
        h = t / 2**doublings
        y = (h * h) * w
        c = s = np.zeros_like(w)
        for n in range(TAYLOR - 1, -1, -1):
            c = y @ c + identity / math.factorial(2 * n)
            s = y @ s + identity / math.factorial(2 * n + 1)
        c = math.exp(-a * h) * c
        s = math.exp(-a * h) * h * s
        for _ in range(doublings):
            c, s = c @ c + w @ (s @ s), 2 * (c @ s)
        return c + a * s, s


def _growth(w: Array) -> float:
    """max(‖W³‖^{1/3}, ‖W⁴‖^{1/4}): bounds ‖Wⁿ‖^{1/n} for n ≥ 6, and is far below ‖W‖ for a very non-normal W.

    Scaling by it instead of ‖W‖ saves squarings, and the digits that they lose [Al-Mohy & Higham, SIAM J. Matrix Anal. 2009].
    """
    norm = float(np.abs(w).sum(axis=-2).max())
    if not 0 < norm < math.inf:
        return 1.0
    unit = w / norm
    square = unit @ unit
    third, fourth = (float(np.abs(p).sum(axis=-2).max()) for p in (square @ unit, square @ square))
    return norm * max(third ** (1 / 3), fourth**0.25)
