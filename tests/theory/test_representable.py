"""Theorem 1 in its general form: verdicts on known Jordan structures, the rule at λ_ε, and the largest multiple."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory_evidence import EPSILONS, assemble, expected

from retrograde.theory import is_representable, lambda_min, largest_multiple, minimising_parameter, obstacles, psi
from retrograde.theory.jordan import analyse
from retrograde.theory.representable import paired, staggered

blocks_of = st.lists(
    st.tuples(st.sampled_from([-2.5, -1.5, -0.02, 0.4, 2.0]), st.integers(1, 3)), min_size=1, max_size=5
).filter(lambda blocks: sum(size for _, size in blocks) <= 8)


@given(blocks_of, st.sampled_from(EPSILONS), st.integers(0, 2**32 - 1))
def test_the_verdict_follows_from_the_blocks(blocks, eps, seed):
    blocks = [(complex(value), size) for value, size in blocks]
    matrix = assemble(blocks, np.random.default_rng(seed), condition=10.0)
    faults = expected(blocks, lambda_min(eps))
    assert is_representable(matrix, eps) == (not faults)
    assert sorted(round(o.eigenvalue, 6) for o in obstacles(matrix, eps)) == sorted(faults)


@given(blocks_of, st.integers(0, 2**32 - 1))
def test_eps_zero_is_culvers_condition(blocks, seed):
    blocks = [(complex(value), size) for value, size in blocks]
    matrix = assemble(blocks, np.random.default_rng(seed), condition=10.0)
    assert is_representable(matrix, 0.0) == (not expected(blocks, 0.0))


def test_a_singular_matrix_is_no_exponential_but_is_representable_for_positive_eps():
    singular = np.array([[1.0, 1.0], [1.0, 1.0]])
    assert not is_representable(singular, 0.0)
    assert "singular" in obstacles(singular, 0.0)[0].rule
    assert is_representable(singular, 0.5)


@pytest.mark.parametrize("eps", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_a_block_at_the_minimum_splits_in_two(m, eps):
    """Why the rule at λ_ε is what it is: Ψ_ε of one block of size m has blocks ⌈m/2⌉ and ⌊m/2⌋."""
    theta = minimising_parameter(eps) * (np.eye(m) + np.eye(m, k=1))
    (cluster,) = analyse(psi(theta, eps), edge=lambda_min(eps), rtol=1e-10).clusters
    assert cluster.blocks == tuple(size for size in ((m + 1) // 2, m // 2) if size)
    assert staggered(cluster.blocks)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_two_forms_of_the_rule_at_the_edge_agree(sizes):
    """Pairs (k, k), (k+1, k) and 1s, against: no two differences of kernel dimensions are the same odd number."""
    assert staggered(tuple(sizes)) == (not expected([(complex(-1), size) for size in sizes], -1.0))


def test_the_rules():
    assert [paired(b) for b in ((1, 1), (2, 2, 1, 1), (2, 1), (3,), (2, 2, 2))] == [True, True, False, False, False]
    assert [staggered(b) for b in ((1,), (2, 1), (2, 2), (2,), (3, 1), (2, 1, 1), (3, 3, 2))] == [
        True, True, True, False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("eps", EPSILONS)
def test_the_edge_itself(eps):
    edge = lambda_min(eps)
    assert is_representable([[edge]], eps)
    assert not is_representable([[edge * (1 + 1e-8)]], eps)
    assert not is_representable([[edge, edge], [0.0, edge]], eps)
    assert is_representable([[edge, edge, 0.0], [0.0, edge, 0.0], [0.0, 0.0, edge]], eps)


def test_more_is_representable_as_eps_grows():
    values = -np.logspace(-4, 0.1, 80)
    for low, high in ((0.0, 0.1), (0.1, 1.0), (1.0, 10.0)):
        before, after = ({v for v in values if is_representable([[v]], eps)} for eps in (low, high))
        assert before < after


@given(blocks_of, st.sampled_from([0.1, 0.5, 2.0, 20.0]), st.integers(0, 2**32 - 1))
def test_the_largest_multiple_is_the_largest(blocks, eps, seed):
    blocks = [(complex(value), size) for value, size in blocks]
    matrix = assemble(blocks, np.random.default_rng(seed), condition=10.0)
    alpha = largest_multiple(matrix, eps)
    negative = expected(blocks, 0.0)
    assert alpha == pytest.approx(min((lambda_min(eps) / v for v in negative), default=math.inf), rel=1e-7)
    if math.isinf(alpha):
        assert is_representable(1e3 * matrix, eps)
    else:
        assert is_representable(0.99 * alpha * matrix, eps)
        assert not is_representable(1.01 * alpha * matrix, eps)


def test_the_largest_multiple_of_a_single_negative_eigenvalue_is_reached():
    alpha = largest_multiple(torch.tensor([[-3.0]]), 0.5)
    assert alpha == lambda_min(0.5) / -3.0
    assert is_representable([[-3.0 * alpha]], 0.5)
