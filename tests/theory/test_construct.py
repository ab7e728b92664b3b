"""`represent`: a real θ whose Ψ_ε is the matrix, for every representable matrix, and a named reason otherwise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import expm
from theory_evidence import EPSILONS, KINDS, assemble, check, degradation, draw
from theory_references import psi_ref, relative_error

from retrograde.theory import lambda_min, psi, represent
from retrograde.theory.construct import edge_series
from retrograde.theory.flow import evaluate
from retrograde.theory.scalar import Inverse


@pytest.mark.parametrize("kind", KINDS)
def test_random_matrices_are_represented_or_refused(kind):
    """The evidence of docs/theory.md on 300 matrices of each kind; `theory_evidence.py` runs 10,000."""
    rng = np.random.default_rng([5, KINDS.index(kind)])
    represented = 0
    for k in range(300):
        problem = draw(kind, EPSILONS[k % len(EPSILONS)], rng)
        right, residual = check(problem)
        assert right, problem
        assert np.isnan(residual) or residual <= 1e-8, (residual, problem)
        represented += not np.isnan(residual)
    assert 60 < represented < 290  # both verdicts were put to the test


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_is_small_in_exact_arithmetic_too(kind):
    """40 digits, so that an error common to `represent` and `psi` cannot hide."""
    rng = np.random.default_rng([6, KINDS.index(kind)])
    found = 0
    while found < 4:
        problem = draw(kind, (0.1, 0.5, 2.0, 20.0)[found], rng)
        if problem.representable:
            theta = represent(problem.matrix, problem.eps)
            reference = psi_ref(theta, problem.eps)
            assert relative_error(problem.matrix, reference) < 1e-9
            found += 1


@given(st.integers(1, 8), st.sampled_from(EPSILONS), st.integers(0, 2**32 - 1))
def test_undoes_psi_on_its_principal_domain(d, eps, seed):
    rng = np.random.default_rng(seed)
    theta = rng.normal(size=(d, d)) * min(1, eps)
    theta *= 2 * min(eps, 1) / np.linalg.norm(theta, 2)  # |Im √W| < π for all eigenvalues
    np.testing.assert_allclose(represent(psi(theta, eps), eps), theta, atol=1e-9)


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_eps_zero_is_a_real_logarithm(d, seed):
    matrix = np.random.default_rng(seed).normal(size=(d, d))
    squared = matrix @ matrix  # always an exponential, if not singular; negative eigenvalues come in pairs at most
    theta = represent(squared, 0.0, max_residual=1e-6)
    assert np.linalg.norm(expm(theta) - squared) < 1e-6 * np.linalg.norm(squared)


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (2, 1), (2, 2), (2, 1, 1), (3, 2), (3, 3), (4, 4), (3, 2, 2, 1)])
@pytest.mark.parametrize("eps", [0.1, 1.0, 10.0])
def test_blocks_at_the_edge(sizes, eps):
    blocks = [(complex(lambda_min(eps)), size) for size in sizes]
    matrix = assemble(blocks, np.random.default_rng(len(sizes)), condition=5.0)
    theta = represent(matrix, eps)
    assert np.linalg.norm(psi(theta, eps) - matrix) < 1e-10 * np.linalg.norm(matrix)


@pytest.mark.parametrize("eps", [0.05, 1.0, 50.0])
def test_edge_series_inverts_psi_around_its_minimum(eps):
    inverse = Inverse.of(eps)
    shift = np.sqrt(-inverse.edge) * np.eye(7, k=1)  # κ² of the size of λ_ε
    x = inverse.at_edge * np.eye(7) + sum(
        m * np.linalg.matrix_power(shift, j) for j, m in enumerate(edge_series(inverse, 6), start=1)
    )
    expected = inverse.edge * np.eye(7) + shift @ shift
    found = evaluate(x, eps)[0]
    np.testing.assert_allclose(found[0, :6], expected[0, :6], atol=1e-12 * -inverse.edge)


def test_paired_blocks_below_the_edge_give_a_real_theta_with_complex_eigenvalues():
    matrix = np.kron(np.eye(2), np.array([[-3.0, 1.0], [0.0, -3.0]]))
    theta = represent(matrix, 0.5)
    assert theta.dtype == np.float64
    assert (np.abs(np.linalg.eigvals(theta).imag) > 1).all()


def test_the_error_names_the_eigenvalue_at_fault():
    matrix = assemble([(-1.75 + 0j, 1), (-2.5 + 0j, 1), (-2.5 + 0j, 1), (1 + 1j, 1)], np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"eigenvalue -1\.75.* with Jordan blocks of sizes \[1\]: below λ_ε = -0\.61"):
        represent(matrix, 1.0)
    with pytest.raises(ValueError, match=r"αA is, for 0 < α < 0\.3505"):
        represent(matrix, 1.0)
    with pytest.raises(ValueError, match=r"no multiple of A is; take ε > 0"):
        represent([[-1.0]], 0.0)


def test_the_residual_grows_where_a_block_nears_the_edge_but_not_above_what_rounding_allows():
    rng = np.random.default_rng(4)
    for distance, bound in ((1e-1, 1e-14), (1e-4, 1e-12), (1e-6, 1e-8)):
        residual, floor, _ = degradation([(complex(lambda_min(0.5) + distance), 2)], 0.5, rng)
        assert residual < bound
        assert residual < 5 * floor + 1e-14


def test_does_not_return_a_poor_theta_silently():
    nearly = lambda_min(1.0) + 1e-7
    matrix = nearly * np.eye(3) + np.eye(3, k=1)
    with pytest.raises(ArithmeticError, match="relative residual of"):
        represent(matrix, 1.0)


def test_close_eigenvalues_cost_nothing():
    for gap in (1e-3, 1e-6, 1e-9, 1e-12, 1e-15, 0.0):
        matrix = np.array([[0.5, 1.0, 1.0], [0.0, 0.5 + gap, 1.0], [0.0, 0.0, 0.5 - gap]])
        assert np.linalg.norm(psi(represent(matrix, 0.5), 0.5) - matrix) < 1e-14 * np.linalg.norm(matrix)
