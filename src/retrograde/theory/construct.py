"""From a linear map back to its parameter: a real θ with Ψ_ε(θ) = A.

The proof of Theorem 1, made numerical:

1. the Jordan clusters of A on or near (−∞, λ_ε] go first in an ordered real Schur form (`jordan`); they decide whether
   θ exists (`representable`);
2. each cluster has a real solution of its own (`branch`): around a real root of Ψ_ε(z) = λ above λ_ε, around the double
   root at it, and around a pair of conjugate roots below it;
3. every other eigenvalue takes its principal root (`inverse`), which is conjugate for conjugate eigenvalues;
4. the entries between them follow by substitution (`branch`), all in one triangular form, and θ is turned back.

Nothing is divided by a difference of eigenvalues and no matrix of eigenvectors is inverted. ε = 0 gives a real logarithm.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import rsf2csf, schur

from retrograde.theory.branch import solve_cluster, substitute
from retrograde.theory.flow import psi
from retrograde.theory.inputs import Array, Matrix, as_matrix, check_eps, check_real, check_rtol
from retrograde.theory.inverse import Inverse
from retrograde.theory.jordan import Structure
from retrograde.theory.representable import CULVER, RTOL, judge, largest_multiple, side, structure_of


def represent(A: Matrix, eps: float, *, rtol: float = RTOL, max_residual: float = 1e-8) -> Matrix:
    """A real θ with Ψ_ε(θ) = A, the inverse of `psi`.

    θ is not unique. Where A has no eigenvalue on (−∞, λ_ε], the θ returned is the one that A alone determines (a
    primary function of A: it commutes with everything A commutes with).

    Args:
        A: real matrix.
        eps: ε ≥ 0; ε = 0 gives a real logarithm.
        rtol: tolerance of the Jordan structure, as for `is_representable`.
        max_residual: largest ‖Ψ_ε(θ) − A‖ / ‖A‖ to return without complaint.

    Shape:
        (d, d) → (d, d)

    Raises:
        ValueError: no θ exists, and the message names the eigenvalue at fault; or A is not a finite real square matrix,
            or ε < 0.
        ArithmeticError: θ exists, but float64 holds it only to a larger residual (defective eigenvalues near λ_ε).

    Example:
        >>> import numpy as np
        >>> from retrograde.theory import psi
        >>> A = np.array([[-2.0, 1.0], [0.0, -2.0]])
        >>> pair = np.kron(np.eye(2), A)  # alone A has no θ; twice, it has
        >>> theta = represent(pair, eps=1.0)
        >>> bool(np.abs(psi(theta, eps=1.0) - pair).max() < 1e-13)
        True
        >>> represent(A, eps=1.0)
        Traceback (most recent call last):
        ...
        ValueError: A is not Ψ_ε(θ) for any real θ at ε = 1: eigenvalue -2 with Jordan blocks of sizes [2]: below λ_ε = \
-0.613499, each size must occur an even number of times; αA is, for 0 < α < 0.306749
    """
    matrix, restore = as_matrix(A, "A")
    eps, rtol = check_eps(eps, zero=CULVER), check_rtol(rtol)
    if (limit := check_real(max_residual, "max_residual")) <= 0:
        raise ValueError(f"max_residual = {limit}: expected a number > 0, such as 1e-8")
    structure = structure_of(matrix, eps, rtol)
    if found := judge(structure, eps):
        alpha = largest_multiple(matrix, eps, rtol=rtol)
        advice = f"αA is, for 0 < α < {alpha:.6g}" if alpha else "no multiple of A is; take ε > 0"
        faults = "; ".join(map(str, found))
        raise ValueError(f"A is not Ψ_ε(θ) for any real θ at ε = {eps:g}: {faults}; {advice}")
    theta = _solve(structure, Inverse.of(eps))
    if not (residual := relative_residual(theta, matrix, eps)) <= limit:
        raise ArithmeticError(
            f"A is representable at ε = {eps:g}, but float64 holds θ (norm {np.linalg.norm(theta):.1e}) only to a "
            f"relative residual of {residual:.1e}, above max_residual = {limit:g}; raise that to accept it"
        )
    return restore(theta)


def relative_residual(theta: Array, matrix: Array, eps: float) -> float:
    """‖Ψ_ε(θ) − A‖ / ‖A‖ (Frobenius); ∞ where Ψ_ε(θ) exceeds float64."""
    try:
        gap = psi(theta, eps) - matrix
    except OverflowError:
        return math.inf
    sizes = []
    for part in (gap, matrix):  # squares of entries near 1e±200 leave the range of float64
        largest = float(np.abs(part).max())
        sizes.append(largest * float(np.linalg.norm(part / largest)) if largest else 0.0)
    return sizes[0] / (sizes[1] or 1.0)


def _solve(structure: Structure, inverse: Inverse) -> Array:
    """θ = Q U X Uᴴ Qᵀ, with X upper triangular and Ψ_ε(X) = Uᴴ T U."""
    d, tail = len(structure.t), structure.tail
    u = np.eye(d, dtype=complex)
    x = np.zeros((d, d), dtype=complex)
    known = np.eye(d, dtype=bool)
    for cluster in structure.clusters:
        rows = slice(cluster.start, cluster.start + cluster.size)
        where = side(cluster, inverse.edge, structure.tolerance)
        solution = solve_cluster(cluster, where, inverse)
        x[rows, rows], u[rows, rows] = schur(solution, output="complex")
        known[rows, rows] = True
    t = structure.t.astype(complex)
    if tail < d:
        t_tail, u[tail:, tail:] = rsf2csf(structure.t[tail:, tail:], np.eye(d - tail))
        for i, eigenvalue in enumerate(np.diagonal(t_tail), start=tail):
            x[i, i] = inverse.root(eigenvalue)
    x = substitute(u.conj().T @ t @ u, x, known, inverse.eps)
    turn = structure.q @ u
    return (turn @ x @ turn.conj().T).real
