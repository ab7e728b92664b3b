"""Fixed points of reversible iterations: a RevNet's never attract, a Momentum ResNet's can.

    RevNet     v' = v + φ(x),  x' = x + ψ(v')            J(A, B) = [[I, A], [B, I + BA]]          [sander2021, Prop. 1]
    Momentum   v' = γv + (1−γ)f(x),  x' = x + v'          M(A) = [[γI, (1−γ)A], [γI, I + (1−γ)A]]

with A, B the Jacobians of φ, ψ (or A that of f) at the fixed point, on the state (v, x). Their eigenvalues λ come from
the eigenvalues μ of AB, or of A:

    RevNet     λ² − (2 + μ) λ + 1 = 0                    one root has |λ| ≥ 1, and λ = 1 only for μ = 0
    Momentum   λ² − (1 + γ + (1−γ) μ) λ + γ = 0          both roots have |λ| < 1 exactly when
                                                         ((1 + γ + (1−γ) Re μ) / (1+γ))² + (Im μ)² < 1

The last line is not in the paper: λ ↦ λ + γ/λ maps the circles between |λ| = √γ and |λ| = 1 to ellipses, the largest
with half axes 1+γ and 1−γ. For real μ it reads −2(1+γ)/(1−γ) < μ < 0.
"""

from __future__ import annotations

import cmath

import numpy as np

from retrograde.theory.inputs import Array, Matrix, as_matrix, check_real


def revnet_jacobian(A: Matrix, B: Matrix) -> Matrix:
    """J(A, B) = [[I, A], [B, I + BA]], the Jacobian of a RevNet layer at a fixed point, on the state (v, x).

    Args:
        A: Jacobian of φ.
        B: Jacobian of ψ.

    Shape:
        (d, d), (d, d) → (2d, 2d)

    Raises:
        ValueError: A or B is not a finite real square matrix, or their shapes differ.

    Example:
        >>> revnet_jacobian([[2.0]], [[-1.0]])
        array([[ 1.,  2.],
               [-1., -1.]])
    """
    a, restore = as_matrix(A, "A")
    b = _partner(a, B)
    identity = np.eye(len(a))
    return restore(np.block([[identity, a], [b, identity + b @ a]]))


def revnet_eigenvalue(A: Matrix, B: Matrix) -> complex:
    """An eigenvalue λ of J(A, B) with |λ| ≥ 1 and λ ≠ 1, for invertible A and B.

    λ is the larger root of λ² − (2 + μ) λ + 1 = 0 for the largest eigenvalue μ of AB, so |λ − 1|² = |μ| |λ| > 0.

    Raises:
        ValueError: A or B is singular (to working precision), has the wrong shape or is not finite and real.

    Example:
        >>> revnet_eigenvalue([[1.0]], [[-1.0]])  # μ = −1: on the unit circle, but not 1
        (0.5-0.8660254037844386j)
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
    """M(A) = [[γI, (1−γ)A], [γI, I + (1−γ)A]], the Jacobian of a momentum layer at a fixed point, on (v, x).

    Args:
        A: Jacobian of f at the fixed point.
        gamma: 0 ≤ γ ≤ 1.

    Shape:
        (d, d) → (2d, 2d)

    Raises:
        ValueError: A is not a finite real square matrix, or γ is outside [0, 1].

    Example:
        >>> momentum_jacobian([[-1.0]], gamma=0.5)
        array([[ 0.5, -0.5],
               [ 0.5,  0.5]])
    """
    a, restore = as_matrix(A, "A")
    gamma = _check_gamma(gamma)
    identity, push = np.eye(len(a)), (1 - gamma) * a
    return restore(np.block([[gamma * identity, push], [gamma * identity, identity + push]]))


def is_attracting(A: Matrix, gamma: float) -> bool:
    """Whether a fixed point with Jacobian A attracts: every eigenvalue of M(A) is inside the unit circle.

    Decided from the eigenvalues μ of A by the ellipse at the head of this module. Never for γ = 1.

    Raises:
        ValueError: A is not a finite real square matrix, or γ is outside [0, 1].

    Example:
        >>> A = [[-1.0, 0.2], [0.0, -0.5]]
        >>> is_attracting(A, gamma=0.9), is_attracting(A, gamma=1.0)
        (True, False)
    """
    a, _ = as_matrix(A, "A")
    gamma = _check_gamma(gamma)
    mu = np.linalg.eigvals(a)
    inside = ((1 + gamma + (1 - gamma) * mu.real) / (1 + gamma)) ** 2 + mu.imag**2 < 1
    return gamma < 1 and bool(inside.all())


def spectral_radius(A: Matrix) -> float:
    """max |λ| over the eigenvalues of A: how fast iterations leave or reach a fixed point with Jacobian A.

    Example:
        >>> round(spectral_radius(momentum_jacobian([[-1.0]], gamma=0.5)), 4)
        0.7071
        >>> round(spectral_radius(revnet_jacobian([[1.0]], [[1.0]])), 4)
        2.618
    """
    return float(np.abs(np.linalg.eigvals(as_matrix(A, "A")[0])).max())


def _partner(a: Array, B: Matrix) -> Array:
    b, _ = as_matrix(B, "B")
    if a.shape != b.shape:
        raise ValueError(f"A has shape {a.shape} and B {b.shape}: expected equal shapes (d, d)")
    return b


def _check_gamma(gamma: float) -> float:
    gamma = check_real(gamma, "gamma")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma = {gamma}: expected 0 ≤ gamma ≤ 1")
    return gamma
