"""Numerical evidence for theory/: random matrices with a known Jordan form, judged and represented.

    python tests/theory/theory_evidence.py                # 10,000 matrices, 10,000 pairs (A, B), the tables of docs/theory.md
    python tests/theory/theory_evidence.py --count 500    # a quick look

A problem is A = P J P⁻¹ with J chosen (so the right verdict follows from its blocks alone) and P random with a condition
number up to 30. Blocks are λI + c|λ|N with c in [0.2, 2]. Distinct eigenvalues are at least 0.05 apart, or 3e-8
near λ_ε: nearer ones could not be told from equal ones at the default tolerance.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.linalg import block_diag

from retrograde.theory import is_representable, lambda_min, psi, represent, revnet_eigenvalue, revnet_jacobian
from retrograde.theory.flow import evaluate

EPSILONS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
KINDS = ("gaussian", "distinct", "repeated", "complex", "defective", "near", "edge")
Block = tuple[complex, int]


@dataclass(frozen=True)
class Problem:
    kind: str
    matrix: np.ndarray
    eps: float
    representable: bool
    at_fault: tuple[float, ...]


def expected(blocks: list[Block], edge: float) -> tuple[float, ...]:
    """The real eigenvalues that break the theorem's condition, from the exact block structure."""
    sizes: dict[float, list[int]] = defaultdict(list)
    for value, size in blocks:
        if value.imag == 0 and value.real <= edge:
            sizes[value.real].append(size)
    faults = []
    for value, found in sizes.items():
        if value < edge:
            fine = all(count % 2 == 0 for count in Counter(found).values())
        else:  # a nilpotent matrix has a square root: no two differences of kernel dimensions are the same odd number
            kernels = [sum(size > k for size in found) for k in range(max(found))]
            odd = [kernel for kernel in kernels if kernel % 2]
            fine = len(odd) == len(set(odd))
        if not fine:
            faults.append(value)
    return tuple(faults)


def assemble(blocks: list[Block], rng: np.random.Generator, condition: float = 30.0) -> np.ndarray:
    """P J P⁻¹ with J real; a non-real eigenvalue stands for its pair, and takes twice its size."""
    parts = []
    for value, size in blocks:
        shift = abs(value) * rng.uniform(0.2, 2) * np.eye(size, k=1)
        if value.imag:
            turn = np.array([[value.real, value.imag], [-value.imag, value.real]])
            parts.append(np.kron(np.eye(size), turn) + np.kron(shift, np.eye(2)))
        else:
            parts.append(value.real * np.eye(size) + shift)
    jordan = block_diag(*parts)
    d = len(jordan)
    left, right = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
    spread = np.exp(rng.uniform(0, np.log(condition), size=d))
    return left * spread @ right @ jordan @ right.T @ (left / spread).T


def draw(kind: str, eps: float, rng: np.random.Generator, condition: float = 30.0) -> Problem:
    """One problem of a kind, with d ≤ 8."""
    edge = lambda_min(eps)
    d = int(rng.integers(1, 9))
    while True:
        if kind == "gaussian":
            matrix = rng.normal(size=(d, d)) * rng.choice([0.3, 1.0, 3.0])
            real = [x.real for x in np.linalg.eigvals(matrix) if x.imag == 0]
            if min([abs(x - edge) for x in real], default=1.0) < 1e-6:
                continue
            faults = tuple(x for x in real if x < edge)
            return Problem(kind, matrix, eps, not faults, faults)
        blocks = choose_blocks(kind, d, edge, rng)
        values = sorted({value for value, _ in blocks}, key=lambda z: (z.real, z.imag))
        apart = 3e-8 if kind == "near" else 0.05
        if any(abs(a - b) < apart for a, b in pairwise(values)) and kind != "edge":
            continue
        faults = expected(blocks, edge)
        return Problem(kind, assemble(blocks, rng, condition), eps, not faults, faults)


def choose_blocks(kind: str, d: int, edge: float, rng: np.random.Generator) -> list[Block]:
    def real() -> complex:
        return complex(rng.choice([rng.uniform(-3, -0.05), rng.uniform(0.05, 3)]))

    def off_axis() -> complex:
        return complex(rng.uniform(-3, 3), rng.uniform(0.05, 3))

    blocks: list[Block] = []
    while (room := d - sum(size * (2 if value.imag else 1) for value, size in blocks)) > 0:
        size = int(rng.integers(1, room + 1))
        if kind == "distinct":
            blocks.append((complex(abs(real())) if rng.random() < 0.6 else real(), 1))
        elif kind == "repeated":
            blocks += [(real(), 1)] * size
        elif kind == "complex":
            blocks += [(off_axis(), min(room // 2, int(rng.integers(1, 3))))] if room > 1 else [(real(), 1)]
        elif kind == "defective":
            twice = 2 * size <= room and rng.random() < 0.8
            blocks += [(real(), min(size, 4))] * (2 if twice else 1)
        elif kind == "near":
            offset = rng.choice([-1, 1]) * 10 ** rng.uniform(-8, -2) * 3
            blocks += [(complex(edge + offset), 1)] * min(room, int(rng.integers(1, 3)))
            blocks += [(complex(rng.uniform(0.5, 3)), 1)] if room > 2 else []
        else:
            blocks.append((complex(edge), min(room, int(rng.integers(1, 4)))))
            if room > 4 and rng.random() < 0.5:
                blocks.append((complex(rng.uniform(0.5, 3)), 1))
    return blocks


def check(problem: Problem) -> tuple[bool, float]:
    """(the verdict was right and `represent` acted on it, relative residual or NaN where refused)."""
    verdict = is_representable(problem.matrix, problem.eps)
    try:
        theta = represent(problem.matrix, problem.eps, max_residual=1e300)
    except ValueError as error:
        named = float(str(error).split("eigenvalue ")[1].split(" with")[0])
        found = min((abs(named - fault) for fault in problem.at_fault), default=np.inf)
        return not verdict and not problem.representable and found < 1e-6 * np.linalg.norm(problem.matrix), np.nan
    residual = np.linalg.norm(psi(theta, problem.eps) - problem.matrix) / np.linalg.norm(problem.matrix)
    return verdict and problem.representable, float(residual)


def revnet_case(rng: np.random.Generator) -> tuple[float, float, float]:
    """(|λ|, |λ − 1|, backward error of λ as an eigenvalue of J(A, B)) for one random pair."""
    d = int(rng.integers(1, 9))
    scale = 10 ** rng.uniform(-2, 2, size=2)
    a, b = scale[0] * rng.normal(size=(d, d)), scale[1] * rng.normal(size=(d, d))
    jacobian, predicted = revnet_jacobian(a, b), revnet_eigenvalue(a, b)
    smallest = np.linalg.svd(jacobian - predicted * np.eye(2 * d), compute_uv=False)[-1]
    return abs(predicted), abs(predicted - 1), float(smallest / np.linalg.norm(jacobian, 2))


def rounding_floor(theta: np.ndarray, eps: float, norm: float) -> float:
    """u ‖θ‖ ‖L‖ / ‖A‖, with L the Fréchet derivative of Ψ_ε: what rounding the entries of θ alone does to Ψ_ε(θ)."""
    d = len(theta)
    directions = np.eye(d * d).reshape(d * d, d, d)
    zero, same = np.zeros_like(directions), np.broadcast_to(theta, directions.shape)
    pairs = np.block([[same, directions], [zero, same]])
    derivative = evaluate(pairs, eps)[0][:, :d, d:].reshape(d * d, d * d)
    if not np.isfinite(derivative).all():
        return np.inf
    return float(1.1e-16 * np.linalg.norm(theta) * np.linalg.norm(derivative, 2) / norm)


def degradation(
    blocks: list[Block], eps: float, rng: np.random.Generator, runs: int = 20
) -> tuple[float, float, float]:
    """Median (residual, rounding floor, ‖θ‖) of A = P J P⁻¹ over random P with condition number up to 10."""
    rows = []
    for _ in range(runs):
        matrix = assemble(blocks, rng, condition=10.0)
        try:
            theta = represent(matrix, eps, max_residual=1e300)
        except ArithmeticError:
            rows.append((np.inf, np.inf, np.inf))
            continue
        norm = float(np.linalg.norm(matrix))
        residual = np.linalg.norm(psi(theta, eps) - matrix) / norm
        rows.append((float(residual), rounding_floor(theta, eps, norm), float(np.linalg.norm(theta))))
    return tuple(np.median(np.array(rows), axis=0).tolist())


def table(*rows: list[object]) -> None:
    """A table in Markdown; the first row is its head."""
    head, *rest = [f"| {' | '.join(map(str, row))} |" for row in rows]
    print("", head, "|" + "---|" * len(rows[0]), *rest, sep="\n")


def outcome(matrix: np.ndarray, rtol: float) -> str:
    try:
        theta = represent(matrix, 1.0, rtol=rtol, max_residual=1e300)
    except ValueError:
        return "refused"
    return f"{np.linalg.norm(psi(theta, 1.0) - matrix) / np.linalg.norm(matrix):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=2021)
    options = parser.parse_args()
    count, rng = options.count, np.random.default_rng(options.seed)

    def checked(kinds: tuple[str, ...], n: int, condition: float) -> dict[str, np.ndarray]:
        """By kind, verdicts (1: right) and residuals of n matrices."""
        found: dict[str, list[tuple[bool, float]]] = {kind: [] for kind in kinds}
        for k in range(n):
            kind, eps = kinds[k % len(kinds)], EPSILONS[k // len(kinds) % len(EPSILONS)]
            found[kind].append(check(draw(kind, eps, rng, condition)))
        return {kind: np.array(values).T for kind, values in found.items()}

    rows: list[list[object]] = []
    for kind, (right, residuals) in checked(KINDS, count, 30.0).items():
        values = residuals[~np.isnan(residuals)]
        figures = [f"{x:.1e}" for x in (np.median(values), np.quantile(values, 0.99), values.max())]
        wrong, above = int((right == 0).sum()), int((values > 1e-8).sum())
        rows.append([kind, len(values), len(right) - len(values), wrong, *figures, above])
    table(
        ["kind", "represented", "refused", "wrong verdict", "median residual", "99 %", "largest", "above 1e-8"], *rows
    )

    distances, rows = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8), []
    for sizes, sign in (([1], 1), ([2], 1), ([3], 1), ([2, 2], -1), ([3, 3], -1)):
        for eps in (0.5, 5.0):
            values = [complex(lambda_min(eps) + sign * distance) for distance in distances]
            found = [degradation([(value, size) for size in sizes], eps, rng) for value in values]
            cells = [f"{residual:.0e} ({floor:.0e})" if residual < 1 else "> 1" for residual, floor, _ in found]
            rows.append([f"{sizes} {'above' if sign > 0 else 'below'}", eps, *cells])
    table(["blocks", "ε", *(f"{distance:.0e}" for distance in distances)], *rows)

    rows = []
    for condition in (1e2, 1e3, 1e4, 1e5):
        right, residuals = np.hstack(list(checked(KINDS[1:], count // 7, condition).values()))
        values = residuals[~np.isnan(residuals)]
        wrong = f"{int((right == 0).sum())} of {len(right)}"
        rows.append([f"{condition:.0e}", wrong, len(values), int((values > 1e-8).sum()), f"{values.max():.0e}"])
    table(["condition number up to", "wrong verdicts", "represented", "residual above 1e-8", "largest"], *rows)

    rows = []
    for gap in (1e-2, 1e-4, 1e-6, 1e-8, 1e-12):
        close, pair = [[1.0, 1.0], [0.0, 1.0 + gap]], [[-2.0, 1.0], [-(gap**2), -2.0]]
        rows.append([f"{gap:.0e}", outcome(np.array(close), 1e-10), outcome(np.array(pair), 1e-15)])
    table(["gap g, or distance g from the cut", "λ = 1 and 1 + g, coupled", "−2 ± ig, coupled"], *rows)

    cases = np.array([revnet_case(rng) for _ in range(count)])
    print(f"\nProp. 1, {count} pairs: least |λ| = 1 − {max(0, 1 - cases[:, 0].min()):.1e}, ", end="")
    print(f"least |λ − 1| = {cases[:, 1].min():.1e}, largest backward error {cases[:, 2].max():.1e}")


if __name__ == "__main__":
    main()
