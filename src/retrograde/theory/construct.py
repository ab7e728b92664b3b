"""From a linear map back to its parameter: a real θ with Ψ_ε(θ) = A.

The proof of Theorem 1 as an algorithm:

1. The Jordan clusters of A on or near (−∞, λ_ε] go first in an ordered real Schur form (`jordan`). They decide whether θ
   exists (`representable`).
2. Each cluster has a real solution of its own: around a real root of Ψ_ε(z) = λ above λ_ε, around the double root at λ_ε, or
   around a pair of conjugate roots below it (`solve_cluster`).
3. Every other eigenvalue takes its principal root (`scalar.Inverse`), which is conjugate for conjugate eigenvalues.
4. Substitution gives the entries between them, all in one triangular form (`substitute`), and θ is turned back.

*Substitution.* For upper triangular X, the entry (i, j) of Ψ_ε(X) is

    Ψ_ε(X)_ij = Ψ_ε[x_i, x_j] x_ij + (something in the entries between i and j),   Ψ_ε[·,·] a divided difference.

So once the diagonal is chosen, Ψ_ε(x_i) = t_i, X follows one superdiagonal at a time: evaluate Ψ_ε with that superdiagonal zero,
and divide what is missing by Ψ_ε[x_i, x_j]. For the square root this is the Björck–Hammarling recurrence. Each equation is solved
to rounding, so the residual is as small as Ψ_ε can be evaluated. Nothing is divided by a difference t_i − t_j (Parlett's
recurrence does that) and no matrix of eigenvectors is inverted, so close and equal eigenvalues need no special care.

*A cluster λI + N below λ_ε.* Ψ_ε(z) = λ has only non-real roots. With paired Jordan blocks there is a real J, J² = −I,
that commutes with N: it swaps the two chains of each pair. If H = Ψ_ε⁻¹(λI + N) is the complex solution around a root z,
then X = Re H + J Im H is real and solves the same equation, J standing for i.

*A cluster at λ_ε.* A real root is double: Ψ_ε(θ_ε + M) = λ_ε + c₂M² + …, so with K² = N (K runs through two chains alternately)
M = m₁K + m₂K² + …, the coefficients following from the same substitution.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import rsf2csf, schur

from .flow import evaluate, psi
from .inputs import Array, Matrix, check_real
from .jordan import Cluster, Structure, chains
from .representable import RTOL, check, judge, largest_multiple, side, structure_of
from .scalar import Inverse


def represent(A: Matrix, eps: float, *, rtol: float = RTOL, max_residual: float = 1e-8) -> Matrix:
    """A real θ with Ψ_ε(θ) = A, the inverse of `psi`.

    θ is not unique. Where A has no eigenvalue on (−∞, λ_ε], the θ returned is the one that A alone determines (a
    primary function of A: it commutes with everything A commutes with).

    Args:
        A: real matrix (d, d).
        eps: ε ≥ 0; ε = 0 gives a real logarithm.
        rtol: tolerance of the Jordan structure, as for `is_representable`.
        max_residual: largest ‖Ψ_ε(θ) − A‖ / ‖A‖ to return without complaint.

    Raises:
        ValueError: no θ exists; the message names the eigenvalue at fault.
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
    matrix, eps, rtol, restore = check(A, eps, rtol)
    limit = check_real(max_residual, "max_residual", "a number > 0, such as 1e-8", lambda limit: limit > 0)
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


def substitute(t: Array, x: Array, known: Array, eps: float) -> Array:
    """x with its entries above the diagonal that are not `known` (a mask) filled so that Ψ_ε(x) = t, both upper triangular."""
    d = len(t)
    rows, columns = np.nonzero(np.triu(~known, 1))
    if not len(rows):
        return x
    pairs = np.zeros((len(rows), 2, 2), dtype=complex)
    pairs[:, 0, 0], pairs[:, 1, 1], pairs[:, 0, 1] = x[rows, rows], x[columns, columns], 1.0
    slopes = np.zeros((d, d), dtype=complex)
    slopes[rows, columns] = evaluate(pairs, eps)[0][:, 0, 1]
    x = x.copy()
    for k in range(1, d):
        here = columns - rows == k
        i, j = rows[here], columns[here]
        if len(i):
            x[i, j] = 0.0
            x[i, j] = (t[i, j] - evaluate(x, eps)[0][i, j]) / slopes[i, j]
    return x


def solve_cluster(cluster: Cluster, where: int, inverse: Inverse) -> Array:
    """A real X with Ψ_ε(X) = λI + V N Vᵀ. `where` is −1, 0 or 1: λ lies below, at or above λ_ε."""
    n, size = cluster.nilpotent, cluster.size
    if where == 0:
        x = inverse.at_edge * np.eye(size) + _at_edge(cluster, inverse)
    else:
        t = cluster.eigenvalue * np.eye(size) + n.astype(complex)
        z = inverse.root(cluster.eigenvalue) * np.eye(size)
        h = substitute(t, z, np.eye(size, dtype=bool), inverse.eps)
        x = h.real if where > 0 else h.real + _swap(cluster) @ h.imag
    return cluster.basis @ x @ cluster.basis.T


def _swap(cluster: Cluster) -> Array:
    """J with J² = −I and JN = NJ: on each pair of equal chains, u ↦ w and w ↦ −u."""
    found = chains(cluster.nilpotent, cluster.kernels)
    sources, images = [], []
    for u, w in zip(found[::2], found[1::2], strict=True):
        norms = np.sqrt((u**2).sum(axis=0) + (w**2).sum(axis=0))
        sources += [u / norms, w / norms]
        images += [w / norms, -u / norms]
    return _linear_map(sources, images)


def _at_edge(cluster: Cluster, inverse: Inverse) -> Array:
    """M with Ψ_ε(θ_ε + M) = λ_ε + N: a series in a square root K of N."""
    if cluster.blocks[0] == 1:
        return np.zeros_like(cluster.nilpotent)
    found = chains(cluster.nilpotent, cluster.kernels)
    sources, images = [], []
    for u, w in zip(found[::2], [*found[1::2], np.zeros((cluster.size, 0))], strict=False):
        if u.shape[1] == 1:  # N vanishes here, and so may K
            sources += [u, w]
            images += [np.zeros_like(u), np.zeros_like(w)]
            continue
        weight = math.sqrt(np.linalg.norm(u[:, 1]))  # K u = weight·w and K w = N u / weight: both of size √‖N‖
        shorter = np.hstack([w, np.zeros((cluster.size, 1))])[:, : u.shape[1]]
        advanced = np.hstack([u[:, 1:], np.zeros((cluster.size, 1))])[:, : w.shape[1]]
        norms = np.linalg.norm(u, axis=0)
        shorter_norms = norms[: w.shape[1]]
        sources += [u / norms, w / shorter_norms]
        images += [weight * shorter / norms, advanced / weight / shorter_norms]
    k = _linear_map(sources, images)
    total, power = np.zeros_like(k), np.eye(cluster.size)
    for coefficient in edge_series(inverse, 2 * cluster.blocks[0]):
        power = power @ k
        total += coefficient * power
    return total


def _linear_map(sources: list[Array], images: list[Array]) -> Array:
    """The matrix that maps the columns of `sources`, a basis, to those of `images`."""
    return np.linalg.solve(np.hstack(sources).T, np.hstack(images).T).T


def edge_series(inverse: Inverse, order: int) -> list[float]:
    """m₁, …, m_{order−1} with Ψ_ε(θ_ε + m₁κ + m₂κ² + …) = λ_ε + κ² + O(κ^{order+1}).

    Ψ_ε acts on series as on the matrices θ_ε I + m₁K + …, K the shift, whose first row holds the coefficients.
    """
    shift = np.eye(order + 1, k=1)
    powers = [np.linalg.matrix_power(shift, j) for j in range(order + 1)]
    x = inverse.at_edge * powers[0]
    curvature = evaluate(x + shift, inverse.eps)[0][0, 2]
    if not curvature > 0:
        raise ArithmeticError(
            f"at ε = {inverse.eps:g} the curvature of Ψ_ε at λ_ε is below the range of float64; take a larger ε"
        )
    found = [1 / math.sqrt(curvature)]
    x = x + found[0] * shift
    for j in range(2, order):
        found.append(-float(evaluate(x, inverse.eps)[0][0, j + 1]) / (2 * curvature * found[0]))
        x = x + found[-1] * powers[j]
    return found
