"""Prop. 1 on random pairs, and where Momentum ResNets do attract."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from theory_evidence import revnet_case

from retrograde.theory import is_attracting, momentum_jacobian, revnet_eigenvalue, revnet_jacobian, spectral_radius

deterministic = settings(derandomize=True, deadline=None, max_examples=200)


def test_revnets_have_the_predicted_eigenvalue():
    rng = np.random.default_rng(8)
    for _ in range(10_000):
        size, from_one, backward_error = revnet_case(rng)
        assert size > 1 - 1e-15
        assert from_one > 1e-6
        assert backward_error < 1e-13


def test_the_revnet_jacobian_is_that_of_the_layer():
    rng = np.random.default_rng(9)
    a, b, v, x = rng.normal(size=(3, 3)), rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3)
    v1 = v + a @ x
    x1 = x + b @ v1
    np.testing.assert_allclose(revnet_jacobian(a, b) @ np.r_[v, x], np.r_[v1, x1], atol=1e-14)


def test_the_momentum_jacobian_is_that_of_the_layer():
    rng = np.random.default_rng(10)
    a, v, x, gamma = rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3), 0.7
    v1 = gamma * v + (1 - gamma) * a @ x
    np.testing.assert_allclose(momentum_jacobian(a, gamma) @ np.r_[v, x], np.r_[v1, x + v1], atol=1e-14)


@deterministic
@given(st.integers(1, 5), st.floats(0, 0.99), st.floats(-2, 1), st.floats(-3, 1), st.integers(0, 2**32 - 1))
def test_the_ellipse_is_the_spectral_radius(d, gamma, log_scale, shift, seed):
    a = 10**log_scale * np.random.default_rng(seed).normal(size=(d, d)) + shift * np.eye(d)
    radius = spectral_radius(momentum_jacobian(a, gamma))
    assume(abs(radius - 1) > 1e-6)
    assert is_attracting(a, gamma) == (radius < 1)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 0.99])
def test_momentum_networks_attract_where_they_should(gamma):
    bound = 2 * (1 + gamma) / (1 - gamma)
    assert is_attracting([[-0.99 * bound]], gamma)
    assert not is_attracting([[-1.01 * bound]], gamma)
    assert not is_attracting([[0.0]], gamma)
    state = np.array([3.0, -2.0])
    for _ in range(5000):
        state = momentum_jacobian([[-1.0]], gamma) @ state
    assert np.abs(state).max() < 1e-8


def test_nothing_attracts_without_friction():
    rng = np.random.default_rng(11)
    assert not any(is_attracting(rng.normal(size=(3, 3)) - 3 * np.eye(3), 1.0) for _ in range(50))


def test_singular_jacobians_are_refused():
    with pytest.raises(ValueError, match="B has rank 1 of 2"):
        revnet_eigenvalue(np.eye(2), np.ones((2, 2)))
    with pytest.raises(ValueError, match="equal shapes"):
        revnet_jacobian(np.eye(2), np.eye(3))
    with pytest.raises(ValueError, match="0 ≤ gamma ≤ 1"):
        momentum_jacobian(np.eye(2), 1.5)
