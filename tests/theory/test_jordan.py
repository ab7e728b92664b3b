"""Jordan structure at a tolerance, on matrices whose structure is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from theory_evidence import assemble

from retrograde.theory.jordan import analyse, chains, staircase

partitions = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 8)


@given(partitions, st.integers(0, 2**32 - 1))
def test_finds_the_blocks_of_one_eigenvalue(sizes, seed):
    matrix = assemble([(complex(-2), size) for size in sizes], np.random.default_rng(seed), condition=10.0)
    (cluster,) = analyse(matrix, edge=-1.0, rtol=1e-10).clusters
    assert cluster.blocks == tuple(sorted(sizes, reverse=True))
    assert abs(cluster.eigenvalue + 2) < 1e-10


@given(partitions, partitions, st.integers(0, 2**32 - 1))
def test_keeps_two_eigenvalues_apart_and_leaves_the_rest(first, second, seed):
    rng = np.random.default_rng(seed)
    blocks = [(complex(-2), k) for k in first[:2]] + [(complex(-3), k) for k in second[:2]] + [(1 + 1j, 1), (2 + 0j, 1)]
    structure = analyse(assemble(blocks, rng, condition=5.0), edge=-1.0, rtol=1e-10)
    found = {round(c.eigenvalue): c.blocks for c in structure.clusters}
    assert found == {-2: tuple(sorted(first[:2], reverse=True)), -3: tuple(sorted(second[:2], reverse=True))}
    assert len(structure.t) - structure.tail == 3


@given(partitions, st.integers(0, 2**32 - 1))
def test_the_structure_found_is_within_the_tolerance(sizes, seed):
    rng = np.random.default_rng(seed)
    matrix = assemble([(complex(-2), size) for size in sizes], rng, condition=10.0)
    structure = analyse(matrix, edge=-1.0, rtol=1e-10)
    (cluster,) = structure.clusters
    exact = cluster.eigenvalue * np.eye(cluster.size) + cluster.basis @ cluster.nilpotent @ cluster.basis.T
    rebuilt = structure.q @ exact @ structure.q.T
    assert np.linalg.norm(rebuilt - matrix, 2) < 3 * structure.tolerance
    assert not np.linalg.matrix_power(cluster.nilpotent, max(sizes)).any()


@given(partitions, st.integers(0, 2**32 - 1))
def test_chains_are_chains_and_a_basis(sizes, seed):
    matrix = assemble([(complex(-2), size) for size in sizes], np.random.default_rng(seed), condition=10.0)
    (cluster,) = analyse(matrix, edge=-1.0, rtol=1e-10).clusters
    found = chains(cluster.nilpotent, cluster.kernels)
    assert tuple(chain.shape[1] for chain in found) == cluster.blocks
    for chain in found:
        ended = np.hstack([chain[:, 1:], np.zeros((len(chain), 1))])
        rounding = 1e-14 * np.linalg.norm(cluster.nilpotent) * np.linalg.norm(chain)
        np.testing.assert_allclose(cluster.nilpotent @ chain, ended, rtol=0, atol=rounding)
    assert np.linalg.matrix_rank(np.hstack([c / np.linalg.norm(c, axis=0) for c in found])) == len(matrix)


@pytest.mark.parametrize(("gap", "together"), [(1e-12, True), (1e-8, False)])
def test_the_tolerance_decides_what_is_one_eigenvalue(gap, together):
    found = analyse(np.diag([-2.0, -2.0 - gap]), edge=-1.0, rtol=1e-10).clusters
    assert [c.blocks for c in found] == ([(1, 1)] if together else [(1,), (1,)])
    assert [c.blocks for c in analyse(np.diag([-2.0, -2.0 - gap]), edge=-1.0, rtol=1e-6).clusters] == [(1, 1)]


def test_a_nearly_defective_pair_of_complex_eigenvalues_counts_as_a_block():
    nearly = np.array([[-2.0, 1.0], [-1e-12, -2.0]])  # −2 ± 1e-6 i, at distance 1e-12 from a Jordan block
    assert [c.blocks for c in analyse(nearly, edge=-1.0, rtol=1e-10).clusters] == [(2,)]
    assert analyse(nearly, edge=-1.0, rtol=1e-14).clusters == ()


def test_eigenvalues_off_the_cut_are_left_alone():
    assert analyse(np.diag([1.0, 1.0, 2.0]), edge=-1.0, rtol=1e-10).clusters == ()
    assert analyse(np.array([[-2.0, 1.0], [-1.0, -2.0]]), edge=-1.0, rtol=1e-10).clusters == ()


def test_a_matrix_that_is_not_nilpotent_has_no_staircase():
    assert staircase(np.array([[0.0, 1.0], [1e-3, 0.0]]), 1e-10) is None
    assert staircase(np.zeros((3, 3)), 0.0)[2] == (3,)
