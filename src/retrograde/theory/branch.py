"""Solving Ψ_ε(X) = T for triangular T, and its real solutions on one Jordan cluster.

*Substitution.* For upper triangular X, the entry (i, j) of Ψ_ε(X) is

    Ψ_ε(X)_ij = Ψ_ε[x_i, x_j] x_ij + (something in the entries between i and j),   Ψ_ε[·,·] a divided difference.

So once the diagonal is chosen, Ψ_ε(x_i) = t_i, X follows one superdiagonal at a time: evaluate Ψ_ε with that
superdiagonal zero, and divide what is missing by Ψ_ε[x_i, x_j]. This is to Ψ_ε what the Björck–Hammarling recurrence is
to the square root. Each equation is solved to rounding, so the residual is as small as Ψ_ε can be evaluated. No difference
t_i − t_j is divided by, so close and equal eigenvalues need no special care (in Parlett's recurrence they do).

*A cluster λI + N below λ_ε.* Ψ_ε(z) = λ has only non-real roots. With paired Jordan blocks there is a real J, J² = −I,
that commutes with N: it swaps the two chains of each pair. If H = Ψ_ε⁻¹(λI + N) is the complex solution around a root z,
then X = Re H + J Im H is real and solves the same equation, J standing for i.

*At λ_ε* a real root is double: Ψ_ε(θ_ε + M) = λ_ε + c₂M² + …, so with K² = N (K runs through two chains alternately)
M = m₁K + m₂K² + …, the coefficients following from the same substitution.
"""

from __future__ import annotations

import math

import numpy as np

from retrograde.theory.flow import evaluate
from retrograde.theory.inputs import Array
from retrograde.theory.inverse import Inverse
from retrograde.theory.jordan import Cluster, chains


def substitute(t: Array, x: Array, known: Array, eps: float) -> Array:
    """Fill the unknown entries above the diagonal of upper triangular x so that Ψ_ε(x) = t.

    Args:
        t: complex upper triangular matrix.
        x: holds the diagonal, with Ψ_ε(x_i) = t_i, and the entries that are known.
        known: boolean mask of the entries given.
        eps: ε ≥ 0.
    """
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
    """A real X with Ψ_ε(X) = λI + V N Vᵀ, for a cluster that satisfies the theorem's condition.

    Args:
        cluster: eigenvalue λ, basis V and nilpotent part N.
        where: −1, 0 or 1: λ is below, at or above λ_ε.
        inverse: the scalar inverse of Ψ_ε.
    """
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
    return np.linalg.solve(np.hstack(sources).T, np.hstack(images).T).T


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
        norms = np.linalg.norm(u, axis=0)
        sources += [u / norms, w / norms[: w.shape[1]]]
        images += [weight * shorter / norms]
        advanced = np.hstack([u[:, 1:], np.zeros((cluster.size, 1))])[:, : w.shape[1]]
        images += [advanced / weight / norms[: w.shape[1]]]
    k = np.linalg.solve(np.hstack(sources).T, np.hstack(images).T).T
    total, power = np.zeros_like(k), np.eye(cluster.size)
    for coefficient in edge_series(inverse, 2 * cluster.blocks[0]):
        power = power @ k
        total += coefficient * power
    return total


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
