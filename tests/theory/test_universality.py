"""The paper's constructions and counter-examples, executed."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from retrograde.theory import (
    crossing,
    embed_first_order,
    is_representable,
    lambda_min,
    largest_multiple,
    linear_flow,
    negative_pair,
    obstruction,
    psi,
    represent,
    second_order_flow,
    sign_flip,
    universal_velocity,
)

deterministic = settings(derandomize=True, deadline=None, max_examples=60)
double = {"dtype": torch.float64}


def test_every_first_order_solution_is_a_second_order_one():
    """Prop. 3, with a field that depends on time and state."""
    eps, x0 = 0.7, torch.tensor([0.3, -1.0], **double)

    def f(t, x):
        return torch.sin(t) * x + torch.stack([x[1], -torch.tanh(x[0])])

    f_hat = embed_first_order(f, eps)

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
    f_hat = embed_first_order(lambda t, x: theta @ x, 0.5)
    x = torch.randn(3, generator=torch.Generator().manual_seed(1), **double)
    torch.testing.assert_close(f_hat(torch.tensor(0.0, **double), x), (0.5 * theta @ theta + theta) @ x)
    # and the flow with v₀ = θ x₀ is the exponential
    on_x, on_v = linear_flow(0.5 * theta @ theta + theta, 0.5)
    torch.testing.assert_close(on_x + on_v @ theta, torch.linalg.matrix_exp(theta))


def test_the_embedding_can_be_trained():
    weight = torch.tensor(0.3, requires_grad=True, **double)
    f_hat = embed_first_order(lambda t, x: weight * x, 0.5)
    f_hat(torch.tensor(0.0, **double), torch.tensor(2.0, **double)).backward()
    assert weight.grad.item() == pytest.approx(2 * (2 * 0.5 * 0.3 + 1))  # d/dw (0.5 w² + w) x


@deterministic
@given(st.floats(-2, 3), st.floats(-5, 5))
def test_with_a_free_velocity_anything_is_represented(log_eps, x0):
    eps = 10**log_eps

    def h(x):
        return -(x**3) + math.cos(5 * x)

    v0 = universal_velocity(h, eps)(x0)
    on_x, on_v = linear_flow(np.zeros((1, 1)), eps)  # ε ẍ + ẋ = 0
    assert (on_x * x0 + on_v * v0).item() == pytest.approx(h(x0), rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("lam", [-1.0, -1.5, -100.0])
def test_without_velocity_minus_one_is_out_of_reach(lam):
    assert obstruction(lambda x: lam * x, [0.1, 1.0]) == 0.1
    assert not any(is_representable([[lam]], eps) for eps in (0.0, 0.1, 1.0, 1e3, 1e6))


@pytest.mark.parametrize("lam", [-0.999, -0.5, -0.01, 0.0, 2.0])
def test_without_velocity_everything_above_minus_one_is_within_reach(lam):
    assert obstruction(lambda x: lam * x, [0.1, 1.0, 10.0]) is None
    eps = next(eps for eps in (0.1, 1.0, 10.0, 1e3) if lambda_min(eps) < lam)
    assert psi(represent([[lam]], eps), eps).item() == pytest.approx(lam, abs=1e-12)


@pytest.mark.parametrize("eps", [0.02, 0.5, 10.0])
def test_half_a_turn_flips_the_sign(eps):
    theta, value = sign_flip(eps)
    assert psi([[theta]], eps).item() == pytest.approx(value, rel=1e-11)
    assert lambda_min(eps) < value < 0
    assert is_representable([[value]], eps)
    assert not is_representable([[value]], 0.0)


def test_trajectories_cross():
    times = np.linspace(0.1, 4, 9)
    for x0 in (-2.0, 1.0, 3.0):
        found = second_order_flow(lambda x: -x / 2, [x0], [-x0 / 2], 1.0, times)[:, 0]
        np.testing.assert_allclose(found, [crossing(x0, float(t)) for t in times], atol=1e-8)
    assert len({round(crossing(x0, math.pi), 12) for x0 in (-2.0, 1.0, 3.0)}) == 1


@pytest.mark.parametrize("lam", [0.3, 2.0, 50.0])
def test_two_negatives_preserve_orientation_yet_are_no_exponential(lam):
    pair = negative_pair(lam)
    assert torch.linalg.det(pair) > 0
    assert not is_representable(pair, 0.0)
    assert largest_multiple(pair, 0.0) == 0
    alpha = largest_multiple(pair, 2.0)
    assert alpha == pytest.approx(-lambda_min(2.0) / max(1, lam), rel=1e-12)
    torch.testing.assert_close(psi(represent(alpha * pair, 2.0), 2.0), alpha * pair)
    with pytest.raises(ValueError, match="lam ≠ 1"):
        negative_pair(1.0)
    assert np.linalg.norm(expm(represent(-np.eye(2), 0.0)) + np.eye(2)) < 1e-14  # λ = 1: a half turn


def test_wrong_points_are_refused():
    with pytest.raises(ValueError, match="x₀ > 0"):
        obstruction(lambda x: x, [-1.0])
    with pytest.raises(ValueError, match="eps = -1"):
        universal_velocity(lambda x: x, -1.0)
