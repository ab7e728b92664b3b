"""Which real matrices a linear second-order model represents.

    A = Ψ_ε(θ) for some real θ   ⟺   Jordan blocks of A for each real eigenvalue
        λ < λ_ε   occur an even number of times, size by size;
        λ = λ_ε   can be put in pairs of sizes (k, k) or (k+1, k), blocks of size 1 left over being fine;
        λ > λ_ε   are free, as are those of non-real eigenvalues.                      [sander2021, Thm. 1, general case]

Departure from the paper, which leaves a gap at λ = λ_ε: there it proves that even numbers suffice, not what is necessary.
Ψ_ε(θ) = λ_ε has one real root θ_ε, with Ψ_ε' = 0 and Ψ_ε'' ≠ 0, so a block of size m for θ_ε becomes two blocks of
sizes ⌈m/2⌉ and ⌊m/2⌋ [Gantmacher, Ch. VI]. Its other roots are conjugate pairs with Ψ_ε' ≠ 0 and give (k, k). Hence the
middle line, necessary and sufficient: the rule by which a nilpotent matrix has a square root.

ε = 0 is Culver's condition for the exponential: A is not singular, and blocks of λ < 0 occur an even number of times.
"Equal" and "zero" are meant at a tolerance: see `jordan`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from .inputs import Array, Matrix, Restore, as_matrix, check_eps, check_real
from .jordan import Cluster, Structure, analyse
from .scalar import lambda_min

RTOL = 1e-10


@dataclass(frozen=True)
class Obstacle:
    """An eigenvalue that keeps a matrix from being represented, the sizes of its Jordan blocks, and the rule broken."""

    eigenvalue: float
    blocks: tuple[int, ...]
    rule: str

    def __str__(self) -> str:
        return f"eigenvalue {self.eigenvalue:.12g} with Jordan blocks of sizes {list(self.blocks)}: {self.rule}"


def is_representable(A: Matrix, eps: float, *, rtol: float = RTOL) -> bool:
    """Whether a real θ with Ψ_ε(θ) = A exists, by the theorem at the head of this module.

    Args:
        A: real matrix (d, d).
        eps: ε ≥ 0; ε = 0 asks for a real logarithm.
        rtol: A is judged by the most degenerate Jordan structure within about rtol·‖A‖ of it, and an eigenvalue within
            rtol·‖A‖ of λ_ε counts as λ_ε.

    Example:
        >>> [is_representable([[-0.5]], eps) for eps in (0.0, 0.5, 1.0)]  # λ_1 = −0.613
        [False, False, True]
        >>> is_representable([[-2.0, 0.0], [0.0, -2.0]], 1.0), is_representable([[-2.0, 1.0], [0.0, -2.0]], 1.0)
        (True, False)
    """
    return not obstacles(A, eps, rtol=rtol)


def obstacles(A: Matrix, eps: float, *, rtol: float = RTOL) -> list[Obstacle]:
    """The eigenvalues that keep A from being Ψ_ε(θ), with the rule that each breaks. Empty if A is representable."""
    matrix, eps, rtol, _ = check(A, eps, rtol)
    return judge(structure_of(matrix, eps, rtol), eps)


def largest_multiple(A: Matrix, eps: float, *, rtol: float = RTOL) -> float:
    """The largest α with αA representable; ∞ where every multiple is: "any mapping up to scale" [sander2021, Sec. 4.3].

    α = min λ_ε/λ over the eigenvalues λ < 0 whose Jordan blocks are not paired. Every smaller α > 0 gives a representable
    αA. α itself does too when the blocks of that λ satisfy the rule for λ_ε (a single eigenvalue does); otherwise α is the
    supremum. For ε = 0 scale does not matter: the result is ∞ or 0. Arguments as for `is_representable`.
    """
    matrix, eps, rtol, _ = check(A, eps, rtol)
    if eps == 0:
        return 0.0 if judge(structure_of(matrix, 0.0, rtol), 0.0) else math.inf
    structure = analyse(matrix, 0.0, rtol)
    at_fault = [
        cluster.eigenvalue
        for cluster in structure.clusters
        if side(cluster, 0.0, structure.tolerance) < 0 and not paired(cluster.blocks)
    ]
    return float(lambda_min(eps) / np.min(at_fault)) if at_fault else math.inf


def check(A: Matrix, eps: float, rtol: float) -> tuple[Array, float, float, Restore]:
    """The arguments that the functions about representability share, and the way back to the kind of A."""
    matrix, restore = as_matrix(A, "A")
    rtol = check_real(
        rtol, "rtol", "0 < rtol < 0.1, a fraction of ‖A‖ (1e-10 unless told)", lambda rtol: 0 < rtol < 0.1
    )
    return matrix, check_eps(eps, zero="Culver's condition for the exponential"), rtol, restore


def structure_of(matrix: Array, eps: float, rtol: float) -> Structure:
    """The Jordan structure that matters at ε: that of the eigenvalues on or near (−∞, λ_ε]."""
    return analyse(matrix, lambda_min(eps) if eps else 0.0, rtol)


def judge(structure: Structure, eps: float) -> list[Obstacle]:
    """The clusters of a structure that break the theorem's condition."""
    edge = lambda_min(eps) if eps else 0.0
    found = []
    for cluster in structure.clusters:
        where = side(cluster, edge, structure.tolerance)
        if where == 0 and eps == 0:
            rule = "A is singular, and an exponential is not"
        elif where < 0 and not paired(cluster.blocks):
            rule = f"below λ_ε = {edge:.6g}, each size must occur an even number of times"
        elif where == 0 and not staggered(cluster.blocks):
            rule = f"at λ_ε = {edge:.6g}, sizes must pair up as (k, k) or (k+1, k), apart from 1s"
        else:
            continue
        found.append(Obstacle(cluster.eigenvalue, cluster.blocks, rule))
    return found


def side(cluster: Cluster, edge: float, tolerance: float) -> int:
    """−1, 0 or 1: the cluster's eigenvalue lies below λ_ε, at it, or above it, at the tolerance."""
    distance = cluster.eigenvalue - edge
    return 0 if abs(distance) <= tolerance else int(math.copysign(1, distance))


def paired(blocks: tuple[int, ...]) -> bool:
    """Each size occurs an even number of times."""
    return all(count % 2 == 0 for count in Counter(blocks).values())


def staggered(blocks: tuple[int, ...]) -> bool:
    """The sizes, largest first, pair up with differences ≤ 1 (a last one alone pairs with 0)."""
    padded = (*sorted(blocks, reverse=True), 0)
    return all(a - b <= 1 for a, b in zip(padded[::2], padded[1::2], strict=False))
