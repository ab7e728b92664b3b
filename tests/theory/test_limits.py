"""The limits ε → 0 and ε → ∞: that they hold for a nonlinear f, and at what rate."""

import numpy as np
import pytest

from retrograde.theory import (
    damped_flow,
    first_order_flow,
    first_order_gap,
    frictionless_flow,
    frictionless_gap,
    linear_flow,
    second_order_flow,
)


def field(x):
    return np.array([np.sin(x[1]) - x[0], x[0] * x[1] - 0.5])


def slope(gap, epsilons):
    gaps = [gap(field, [1.0, -0.5], [2.0, 1.0], eps) for eps in epsilons]
    return np.polyfit(np.log(epsilons), np.log(gaps), 1)[0]


def test_the_distance_to_the_first_order_model_falls_like_eps():
    assert slope(first_order_gap, [1e-2, 3e-3, 1e-3, 3e-4]) == pytest.approx(1, abs=0.05)


def test_the_distance_to_the_frictionless_model_falls_like_one_over_eps():
    assert slope(frictionless_gap, [1e2, 3e2, 1e3, 3e3]) == pytest.approx(-1, abs=0.02)


@pytest.mark.parametrize("eps", [0.05, 1.0, 20.0])
def test_the_linear_case_agrees_with_the_matrix_function(eps):
    theta = np.random.default_rng(0).normal(size=(2, 2))
    x0, v0, times = np.array([1.0, 2.0]), np.array([-1.0, 0.5]), np.array([0.3, 1.0])
    found = second_order_flow(lambda x: theta @ x, x0, v0, eps, times)
    for t, x in zip(times, found, strict=True):
        on_x, on_v = linear_flow(theta, eps, float(t))
        np.testing.assert_allclose(x, on_x @ x0 + on_v @ v0, atol=1e-7)
    # ẍ + ẋ/ε = θ x is ε ẍ + ẋ = ε θ x
    damped = damped_flow(lambda x: theta @ x, x0, v0, eps, times)
    np.testing.assert_allclose(damped, second_order_flow(lambda x: eps * theta @ x, x0, v0, eps, times), atol=1e-7)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="x0 has shape"):
        first_order_flow(np.sin, [[1.0]], [1.0])
    with pytest.raises(ValueError, match="v0"):
        frictionless_flow(np.sin, [1.0], [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="increasing times"):
        first_order_flow(np.sin, [1.0], [1.0, 0.5])
    with pytest.raises(ValueError, match="eps = 0"):
        second_order_flow(np.sin, [1.0], [1.0], 0.0, [1.0])
    with pytest.raises(ValueError, match="horizon"):
        first_order_gap(np.sin, [1.0], [1.0], 0.1, horizon=-1.0)


def test_a_solution_that_blows_up_is_an_error():
    with pytest.raises(ArithmeticError, match="not solved"):
        first_order_flow(lambda x: x**2, [1.0], [2.0])
