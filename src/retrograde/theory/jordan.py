"""The Jordan structure of a real matrix at a stated tolerance, for the eigenvalues on and near a cut (−∞, edge].

A Jordan form is not a continuous function of the matrix, so it exists only at a tolerance. Here A gets the most degenerate
structure that some A + E has, with ‖E‖ about rtol·‖A‖:

- Eigenvalues are grouped by single linkage, the widest groups first.
- A group counts as one real eigenvalue λ, the group's mean, when N = T − λI is nilpotent at the tolerance, with T the
  group's diagonal block in an ordered real Schur form. The staircase of Kublanovskaya, and of Golub & Wilkinson, decides that:
  singular values of N up to rtol·‖A‖ are zero, their vectors are the kernel, and the same is done with the rest. The
  heights of the stairs are dim ker N, dim ker N² − dim ker N, …, and give the sizes of the blocks.
- Otherwise the group is split at its widest gap.

All of it is orthogonal, so what is dropped is E. No eigenvectors of nearly defective matrices are used. Eigenvalues off the
cut, and complex pairs, put no condition on A: they stay in the trailing block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.linalg import lapack, schur

from .inputs import Array


@dataclass(frozen=True)
class Cluster:
    """A group of eigenvalues that counts as one: rows `start : start + size` of the Schur form, there λI + V N Vᵀ."""

    start: int
    eigenvalue: float
    basis: Array  # V, orthogonal (size, size)
    nilpotent: Array  # N, strictly block upper triangular
    kernels: tuple[int, ...]  # dim ker Nᵏ − dim ker Nᵏ⁻¹: the block heights of N

    @property
    def size(self) -> int:
        return len(self.nilpotent)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Sizes of the Jordan blocks, largest first: `kernels[k]` of them are larger than k."""
        return tuple(sum(kernel > j for kernel in self.kernels) for j in range(self.kernels[0]))


@dataclass(frozen=True)
class Structure:
    """A = Q T Qᵀ, with the clusters first and every other eigenvalue in rows `tail :`. tolerance = rtol·‖A‖."""

    q: Array
    t: Array
    clusters: tuple[Cluster, ...]
    tail: int
    tolerance: float


def analyse(matrix: Array, edge: float, rtol: float) -> Structure:
    """The structure of a real matrix for its eigenvalues on or near (−∞, edge].

    Example:
        >>> jordan = np.array([[-2.0, 1.0, 0.0], [0.0, -2.0, 0.0], [0.0, 0.0, 5.0]])
        >>> [(c.eigenvalue, c.blocks) for c in analyse(jordan, edge=-1.0, rtol=1e-10).clusters]
        [(-2.0, (2,))]
    """
    search = _Search(matrix, edge, rtol)
    search.visit(list(range(len(matrix))))
    return Structure(search.q, search.t, tuple(search.clusters), search.done, search.tolerance)


class _Search:
    """Splits the spectrum from the widest group down, moving each accepted group to the front of the Schur form."""

    def __init__(self, matrix: Array, edge: float, rtol: float) -> None:
        self.t, self.q = schur(matrix, output="real")
        self.edge, self.rtol = edge, rtol
        self.scale = float(np.linalg.norm(matrix, 2))
        self.tolerance = rtol * self.scale
        _, _, real, imag, *_ = lapack.dtrsen(np.zeros(len(matrix), dtype=np.int32), self.t, np.eye(len(matrix)))
        self.eigenvalues = real + 1j * imag
        self.order = list(range(len(matrix)))  # which eigenvalue stands where on the diagonal
        self.done = 0
        self.clusters: list[Cluster] = []

    def visit(self, group: list[int]) -> None:
        values = self.eigenvalues[group]
        if abs(values.imag.sum()) > 1e-8 * np.abs(values.imag).sum():
            return  # off the real axis; the conjugate eigenvalues are another group
        centre = float(values.real.mean())
        radius = float(np.abs(values - centre).max())
        if centre - 2 * radius - self.tolerance > self.edge:
            return
        # Elsner's bound, rounded up: how far ‖E‖ ≤ rtol·‖A‖ can move an eigenvalue of this multiplicity.
        reach = 2 * self.scale * (len(group) * self.rtol) ** (1 / len(group))
        if radius <= reach and self.accept(group):
            return
        if len(group) > 1:
            for part in _split_at_widest_gap(self.eigenvalues, group):
                self.visit(part)

    def accept(self, group: list[int]) -> bool:
        """Move the group to row `done`; keep it as a cluster if its block is nilpotent up to a shift."""
        done = self.done
        t, q, order = self.moved(group)
        block = t[done : done + len(group), done : done + len(group)]
        eigenvalue = float(np.trace(block)) / len(group)
        found = staircase(block - eigenvalue * np.eye(len(group)), self.tolerance)
        if found is None:
            return False
        self.t, self.q, self.order = t, q, order
        self.clusters.append(Cluster(done, eigenvalue, *found))
        self.done = done + len(group)
        return True

    def moved(self, group: list[int]) -> tuple[Array, Array, list[int]]:
        """T, Q and the order of the eigenvalues after the group is moved to row `done`."""
        done = self.done
        chosen = np.array([index in group for index in self.order[done:]])
        rest, z, *_, info = lapack.dtrsen(
            chosen.astype(np.int32), self.t[done:, done:], np.eye(len(self.t) - done), job="N"
        )
        if info:
            raise ArithmeticError(f"eigenvalues {self.eigenvalues[group]} could not be gathered (dtrsen info {info})")
        t, q = self.t.copy(), self.q.copy()
        t[done:, done:] = rest
        t[:done, done:] = t[:done, done:] @ z
        q[:, done:] = q[:, done:] @ z
        tail = np.array(self.order[done:])
        return t, q, self.order[:done] + [*tail[chosen].tolist(), *tail[~chosen].tolist()]


def staircase(n: Array, tolerance: float) -> tuple[Array, Array, tuple[int, ...]] | None:
    """(V, VᵀNV, kernel dimensions) with VᵀNV strictly block upper triangular, or None where N is not nilpotent.

    Singular values ≤ tolerance count as zero.

    Example:
        >>> staircase(np.array([[0.0, 1.0], [0.0, 0.0]]), 1e-10)[2], staircase(np.eye(2), 1e-10)
        ((1, 1), None)
    """
    v: Array = np.eye(len(n))
    heights: list[int] = []
    rest = n
    while len(rest):
        _, sigma, right = np.linalg.svd(rest)
        nullity = int((sigma <= tolerance).sum())
        if nullity == 0 or (heights and nullity > heights[-1]):
            return None
        turn = np.vstack([right[len(rest) - nullity :], right[: len(rest) - nullity]]).T  # kernel first
        v[:, sum(heights) :] = v[:, sum(heights) :] @ turn
        rest = (turn.T @ rest @ turn)[nullity:, nullity:]
        heights.append(nullity)
    level = np.repeat(np.arange(len(heights)), heights)
    nilpotent = np.where(level[:, None] < level[None, :], v.T @ n @ v, 0.0)
    return v, nilpotent, tuple(heights)


def chains(nilpotent: Array, kernels: tuple[int, ...]) -> list[Array]:
    """Jordan chains [u, Nu, N²u, …] of a staircase form, as matrices of columns, longest first.

    Tops are orthonormal modulo what the longer chains already span, so that the basis is no worse than N makes it.
    """
    found: list[Array] = []
    edges = np.concatenate([[0], np.cumsum(kernels)])
    for level in range(len(kernels) - 1, -1, -1):
        rows = slice(edges[level], edges[level + 1])
        reached = [chain[rows, chain.shape[1] - 1 - level] for chain in found]
        q = np.linalg.qr(np.stack(reached, axis=1), mode="complete")[0] if reached else np.eye(kernels[level])
        for top in q.T[len(reached) :]:
            columns = [np.zeros(len(nilpotent))]
            columns[0][rows] = top
            for _ in range(level):
                columns.append(nilpotent @ columns[-1])
            found.append(np.stack(columns, axis=1))
    return found


def _split_at_widest_gap(values: Array, group: list[int]) -> list[list[int]]:
    """The parts of a group that remain when the longest link of its minimum spanning tree, and any as long, is cut."""
    links = linkage(np.column_stack([values[group].real, values[group].imag]), "single")
    labels = fcluster(links, links[-1, 2] * (1 - 1e-6), "distance")
    return [[group[i] for i in np.flatnonzero(labels == label)] for label in np.unique(labels)]
