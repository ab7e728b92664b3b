"""The paper's propositions besides Theorem 1, executed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from theory_evidence import revnet_case

from retrograde import theory

# Prop. 1 on random pairs, and where Momentum ResNets do attract -----------------------------------------------------


def test_revnets_have_the_predicted_eigenvalue():
    rng = np.random.default_rng(8)
    for _ in range(2_000):
        size, from_one, backward_error = revnet_case(rng)
        assert size > 1 - 1e-15
        assert from_one > 1e-6
        assert backward_error < 1e-13


def test_the_revnet_jacobian_is_that_of_the_layer():
    rng = np.random.default_rng(9)
    a, b, v, x = rng.normal(size=(3, 3)), rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3)
    v1 = v + a @ x
    x1 = x + b @ v1
    np.testing.assert_allclose(theory.revnet_jacobian(a, b) @ np.r_[v, x], np.r_[v1, x1], atol=1e-14)


def test_the_momentum_jacobian_is_that_of_the_layer():
    rng = np.random.default_rng(10)
    a, v, x, gamma = rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3), 0.7
    v1 = gamma * v + (1 - gamma) * a @ x
    np.testing.assert_allclose(theory.momentum_jacobian(a, gamma) @ np.r_[v, x], np.r_[v1, x + v1], atol=1e-14)


@given(st.integers(1, 5), st.floats(0, 0.99), st.floats(-2, 1), st.floats(-3, 1), st.integers(0, 2**32 - 1))
def test_the_ellipse_is_the_spectral_radius(d, gamma, log_scale, shift, seed):
    a = 10**log_scale * np.random.default_rng(seed).normal(size=(d, d)) + shift * np.eye(d)
    radius = theory.spectral_radius(theory.momentum_jacobian(a, gamma))
    assume(abs(radius - 1) > 1e-6)
    assert theory.is_attracting(a, gamma) == (radius < 1)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 0.99])
def test_momentum_networks_attract_where_they_should(gamma):
    bound = 2 * (1 + gamma) / (1 - gamma)
    assert theory.is_attracting([[-0.99 * bound]], gamma)
    assert not theory.is_attracting([[-1.01 * bound]], gamma)
    assert not theory.is_attracting([[0.0]], gamma)
    state = np.array([3.0, -2.0])
    for _ in range(5000):
        state = theory.momentum_jacobian([[-1.0]], gamma) @ state
    assert np.abs(state).max() < 1e-8


# The limits ε → 0 and ε → ∞: that they hold for a nonlinear f, and at what rate -------------------------------------


def field(x):
    return np.array([np.sin(x[1]) - x[0], x[0] * x[1] - 0.5])


def slope(gap, epsilons):
    gaps = [gap(field, [1.0, -0.5], [2.0, 1.0], eps) for eps in epsilons]
    return np.polyfit(np.log(epsilons), np.log(gaps), 1)[0]


def test_the_distance_to_the_first_order_model_falls_like_eps():
    assert slope(theory.first_order_gap, [1e-2, 3e-3, 1e-3, 3e-4]) == pytest.approx(1, abs=0.05)


def test_the_distance_to_the_frictionless_model_falls_like_one_over_eps():
    assert slope(theory.frictionless_gap, [1e2, 3e2, 1e3, 3e3]) == pytest.approx(-1, abs=0.02)


@pytest.mark.parametrize("eps", [0.05, 1.0, 20.0])
def test_the_linear_case_agrees_with_the_matrix_function(eps):
    theta = np.random.default_rng(0).normal(size=(2, 2))
    x0, v0, times = np.array([1.0, 2.0]), np.array([-1.0, 0.5]), np.array([0.3, 1.0])
    found = theory.second_order_flow(lambda x: theta @ x, x0, v0, eps, times)
    for t, x in zip(times, found, strict=True):
        on_x, on_v = theory.linear_flow(theta, eps, float(t))
        np.testing.assert_allclose(x, on_x @ x0 + on_v @ v0, atol=1e-7)
    # ẍ + ẋ/ε = θ x is ε ẍ + ẋ = ε θ x
    damped = theory.damped_flow(lambda x: theta @ x, x0, v0, eps, times)
    np.testing.assert_allclose(
        damped, theory.second_order_flow(lambda x: eps * theta @ x, x0, v0, eps, times), atol=1e-7
    )


def test_a_solution_that_blows_up_is_an_error():
    with pytest.raises(ArithmeticError, match="not solved"):
        theory.first_order_flow(lambda x: x**2, [1.0], [2.0])


# The paper's constructions and counter-examples, executed -----------------------------------------------------------


double = {"dtype": torch.float64}


def test_every_first_order_solution_is_a_second_order_one():
    """Prop. 3, with a field that depends on time and state."""
    eps, x0 = 0.7, torch.tensor([0.3, -1.0], **double)

    def f(t, x):
        return torch.sin(t) * x + torch.stack([x[1], -torch.tanh(x[0])])

    f_hat = theory.embed_first_order(f, eps)

    def first(t, x):
        return f(torch.tensor(t, **double), torch.from_numpy(x)).numpy()

    def second(t, state):
        push = f_hat(torch.tensor(t, **double), torch.from_numpy(state[:2])).numpy()
        return np.r_[state[2:], (push - state[2:]) / eps]

    start = x0.numpy()
    tolerance = {"rtol": 1e-11, "atol": 1e-11, "t_eval": [0.5, 1.0, 2.0]}
    one = solve_ivp(first, (0, 2), start, "DOP853", **tolerance)
    two = solve_ivp(second, (0, 2), np.r_[start, first(0.0, start)], "DOP853", **tolerance)
    np.testing.assert_allclose(two.y[:2], one.y, atol=1e-9)


def test_the_embedding_of_a_linear_field_is_its_formula():
    theta = torch.randn(3, 3, generator=torch.Generator().manual_seed(0), **double)
    f_hat = theory.embed_first_order(lambda t, x: theta @ x, 0.5)
    x = torch.randn(3, generator=torch.Generator().manual_seed(1), **double)
    torch.testing.assert_close(f_hat(torch.tensor(0.0, **double), x), (0.5 * theta @ theta + theta) @ x)
    # and the flow with v₀ = θ x₀ is the exponential
    on_x, on_v = theory.linear_flow(0.5 * theta @ theta + theta, 0.5)
    torch.testing.assert_close(on_x + on_v @ theta, torch.linalg.matrix_exp(theta))


def test_the_embedding_can_be_trained():
    weight = torch.tensor(0.3, requires_grad=True, **double)
    f_hat = theory.embed_first_order(lambda t, x: weight * x, 0.5)
    f_hat(torch.tensor(0.0, **double), torch.tensor(2.0, **double)).backward()
    assert weight.grad.item() == pytest.approx(2 * (2 * 0.5 * 0.3 + 1))  # d/dw (0.5 w² + w) x


@given(st.floats(-2, 3), st.floats(-5, 5))
def test_with_a_free_velocity_anything_is_represented(log_eps, x0):
    eps = 10**log_eps

    def h(x):
        return -(x**3) + math.cos(5 * x)

    v0 = theory.universal_velocity(h, eps)(x0)
    on_x, on_v = theory.linear_flow(np.zeros((1, 1)), eps)  # ε ẍ + ẋ = 0
    assert (on_x * x0 + on_v * v0).item() == pytest.approx(h(x0), rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("lam", [-1.0, -1.5, -100.0])
def test_without_velocity_minus_one_is_out_of_reach(lam):
    assert theory.obstruction(lambda x: lam * x, [0.1, 1.0]) == 0.1
    assert not any(theory.is_representable([[lam]], eps) for eps in (0.0, 0.1, 1.0, 1e3, 1e6))


@pytest.mark.parametrize("lam", [-0.999, -0.5, -0.01, 0.0, 2.0])
def test_without_velocity_everything_above_minus_one_is_within_reach(lam):
    assert theory.obstruction(lambda x: lam * x, [0.1, 1.0, 10.0]) is None
    eps = next(eps for eps in (0.1, 1.0, 10.0, 1e3) if theory.lambda_min(eps) < lam)
    assert theory.psi(theory.represent([[lam]], eps), eps).item() == pytest.approx(lam, abs=1e-12)


@pytest.mark.parametrize("eps", [0.02, 0.5, 10.0])
def test_half_a_turn_flips_the_sign(eps):
    theta, value = theory.sign_flip(eps)
    assert theory.psi([[theta]], eps).item() == pytest.approx(value, rel=1e-11)
    assert theory.lambda_min(eps) < value < 0
    assert theory.is_representable([[value]], eps)
    assert not theory.is_representable([[value]], 0.0)


def test_trajectories_cross():
    times = np.linspace(0.1, 4, 9)
    for x0 in (-2.0, 1.0, 3.0):
        found = theory.second_order_flow(lambda x: -x / 2, [x0], [-x0 / 2], 1.0, times)[:, 0]
        np.testing.assert_allclose(found, [theory.crossing(x0, float(t)) for t in times], atol=1e-8)
    assert len({round(theory.crossing(x0, math.pi), 12) for x0 in (-2.0, 1.0, 3.0)}) == 1


@pytest.mark.parametrize("lam", [0.3, 2.0, 50.0])
def test_two_negatives_preserve_orientation_yet_are_no_exponential(lam):
    pair = theory.negative_pair(lam)
    assert torch.linalg.det(pair) > 0
    assert not theory.is_representable(pair, 0.0)
    assert theory.largest_multiple(pair, 0.0) == 0
    alpha = theory.largest_multiple(pair, 2.0)
    assert alpha == pytest.approx(-theory.lambda_min(2.0) / max(1, lam), rel=1e-12)
    torch.testing.assert_close(theory.psi(theory.represent(alpha * pair, 2.0), 2.0), alpha * pair)
    with pytest.raises(ValueError, match="lam ≠ 1"):
        theory.negative_pair(1.0)
    assert np.linalg.norm(expm(theory.represent(-np.eye(2), 0.0)) + np.eye(2)) < 1e-14  # λ = 1: a half turn
