"""Ψ_ε against the block exponential, an ODE solver and 40-digit arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import expm
from theory_references import psi_ref, relative_error

from retrograde.theory import linear_flow, psi


def block_system(theta, eps):
    d = len(theta)
    return np.block([[np.zeros((d, d)), np.eye(d)], [theta / eps, -np.eye(d) / eps]])


@given(st.integers(1, 8), st.integers(0, 2**32 - 1), st.floats(-1.3, 3), st.floats(-2, 1))
def test_equals_the_exponential_of_the_block_system(d, seed, log_eps, log_scale):
    eps = 10**log_eps
    theta = 10**log_scale * np.random.default_rng(seed).normal(size=(d, d))
    flow = expm(block_system(theta, eps))
    on_x, on_v = linear_flow(theta, eps)
    np.testing.assert_allclose(on_x, flow[:d, :d], rtol=0, atol=1e-12 * np.linalg.norm(flow[:d, :d]))
    np.testing.assert_allclose(on_v, flow[:d, d:], rtol=0, atol=1e-12 * np.linalg.norm(flow[:d, d:]))


# Rounding θ/ε + 1/(4ε²) alone moves √W by u/(4ε), and with it log Ψ: that is the error to expect.
@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.05, 0.5, 5.0, 50.0, 1e3])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_equals_the_series_in_high_precision(eps, scale):
    theta = scale * np.random.default_rng(2).normal(size=(3, 3))
    assert relative_error(psi(theta, eps), psi_ref(theta, eps)) < 1e-14 * (1 + scale) + 2e-16 / eps


def test_stays_in_range_where_the_series_does_not():
    # W = a² here, and the paper's series sums powers of it beyond 1e308.
    for eps in (1e-3, 1e-4):
        np.testing.assert_allclose(psi(np.zeros((2, 2)), eps), np.eye(2), atol=2e-16 / eps)
    at_minimum = psi(np.array([[-250.0]]), 1e-3).item()  # W = 0: Ψ = e^{−a}(1 + a), a = 500
    assert abs(at_minimum / (math.exp(-500) * 501) - 1) < 1e-12


def test_a_large_non_normal_part_does_not_spoil_the_rest():
    """In Schur form the error is 4e-9 here; squaring the full matrix gives 8e-7."""
    rng = np.random.default_rng(5)
    q = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    theta = q @ (1e4 * np.triu(rng.normal(size=(3, 3)), 1) - np.diag(rng.uniform(0, 1, size=3))) @ q.T
    assert relative_error(psi(theta, 0.1), psi_ref(theta, 0.1)) < 5e-8
    theta = np.array([[-0.3, 1e6], [0.0, -0.7]])
    assert relative_error(psi(theta, 0.5), psi_ref(theta, 0.5)) < 1e-14


@pytest.mark.parametrize("d", [1, 4])
def test_tends_to_the_exponential_like_eps(d):
    theta = np.random.default_rng(3).normal(size=(d, d))
    gaps = [np.linalg.norm(psi(theta, eps) - expm(theta)) for eps in (1e-2, 1e-3, 1e-4)]
    assert 8 < gaps[0] / gaps[1] < 12
    assert 9 < gaps[1] / gaps[2] < 11
    np.testing.assert_allclose(psi(theta, 0.0), expm(theta), atol=1e-13 * np.linalg.norm(expm(theta)))


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10), st.floats(0.05, 1.5), st.floats(0.05, 1.5))
def test_two_flows_make_one(seed, eps, first, second):
    theta = np.random.default_rng(seed).normal(size=(3, 3))

    def whole(t):  # (x, v) at t from x₀ and v₀; the velocity columns by v = ẋ, and ε ẍ + ẋ = θ x
        on_x, on_v = linear_flow(theta, eps, t)
        return np.block([[on_x, on_v], [theta @ on_v / eps, on_x - on_v / eps]])

    both = whole(first + second)
    np.testing.assert_allclose(whole(second) @ whole(first), both, atol=1e-11 * np.linalg.norm(both))


def test_says_when_the_result_is_too_large():
    with pytest.raises(OverflowError, match="exceeds float64"):
        psi(np.array([[1e9]]), 1.0)
