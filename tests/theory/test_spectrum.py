"""λ_ε against a minimisation in 60 digits."""

import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
import torch
from theory_references import lambda_ref

from retrograde.theory import G, lambda_min, minimiser, minimising_parameter, psi


def test_lambda_min_to_twelve_digits_from_1e_minus_3_to_1e3():
    worst = max(
        abs((mp.mpf(lambda_min(float(e))) - lambda_ref(float(e))) / lambda_ref(float(e)))
        for e in np.logspace(-3, 3, 49)
    )
    assert worst < 1e-13  # what e^{−500} makes of one rounding of 1/(2ε) is 5.5e-14


def test_lambda_min_decreases_from_0_to_minus_1():
    values = [lambda_min(float(eps)) for eps in np.logspace(-3, 6, 400)]
    assert all(a > b for a, b in pairwise(values))
    assert -1e-200 < values[0] < 0
    assert -1 < values[-1] < -1 + 1e-6


@pytest.mark.parametrize("eps", [1e-2, 0.1, 1.0, 30.0])
def test_no_other_point_of_G_is_as_low(eps):
    alpha = np.linspace(-60, 60, 200_001)
    low = lambda_min(eps)
    assert (G(alpha, eps) >= low * (1 + 1e-14)).all()
    away = np.abs(np.abs(alpha) - minimiser(eps)) > 0.1
    assert (G(alpha[away], eps) > low * (1 - 1e-6)).all()


@pytest.mark.parametrize("eps", [1e-2, 0.3, 1.0, 50.0])
def test_G_is_psi_along_a_line(eps):
    for alpha in (0.0, 0.7, 3.0, 8.0):
        value = psi(np.array([[-eps * alpha**2 - 0.25 / eps]]), eps).item()
        assert abs(value - G(alpha, eps)) < 1e-13 * math.exp(-0.5 / eps) * (1 + 0.5 / eps) / min(1, eps)
    reached = psi(np.array([[minimising_parameter(eps)]]), eps).item()
    assert abs(reached / lambda_min(eps) - 1) < 1e-12


def test_G_keeps_shape_and_kind():
    assert G(torch.zeros(2, 3), 1.0).shape == (2, 3)
    assert isinstance(G(torch.zeros(2, 3), 1.0), torch.Tensor)


def test_below_the_range_of_float64_lambda_min_is_minus_zero():
    assert lambda_min(5e-4) == 0
    assert lambda_min(7e-4) < 0
