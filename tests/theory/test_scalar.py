"""Ψ_ε of one number: λ_ε against a minimisation in 60 digits, and the inverse."""

import cmath
import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from theory_references import lambda_ref

import retrograde.theory.scalar as scalar
from retrograde.theory import G, lambda_min, minimiser, minimising_parameter, psi
from retrograde.theory.scalar import Inverse, psi_scalar

# λ_ε against a minimisation in 60 digits ----------------------------------------------------------------------------


def test_lambda_min_to_twelve_digits_from_1e_minus_3_to_1e3():
    worst = max(
        abs((mp.mpf(lambda_min(float(e))) - lambda_ref(float(e))) / lambda_ref(float(e)))
        for e in np.logspace(-3, 3, 49)
    )
    assert worst < 1e-13  # what e^{−500} makes of one rounding of 1/(2ε) is 5.5e-14


def test_where_G_is_smallest():
    assert math.pi < minimiser(1e6) < minimiser(1.0) < minimiser(1e-6) < 4.4935  # where tan α = α


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


def test_below_the_range_of_float64_lambda_min_is_minus_zero():
    assert lambda_min(5e-4) == 0
    assert lambda_min(7e-4) < 0


# The scalar inverse: a root, the right one, with its symmetries -----------------------------------------------------


epsilons = st.floats(-3, 3).map(lambda x: 10**x)
angles = st.floats(-math.pi, math.pi)


@given(epsilons, st.floats(-8, 6), angles)
def test_root_is_a_root_in_the_whole_plane(eps, log_radius, angle):
    inverse = Inverse.of(eps)
    value = inverse.edge + 10**log_radius * cmath.exp(1j * angle)
    theta = inverse.root(value)
    assert abs(psi_scalar(theta, eps)[0] - value) < 2e-14 * (abs(value) + abs(inverse.edge))
    assert inverse.root(value.conjugate()) == theta.conjugate() or value.imag == 0


@given(epsilons, st.floats(0.05, 6), st.floats(-3.1, 3.1))
def test_root_stays_on_the_principal_sheet(eps, s_real, s_imag):
    """Ψ_ε is one to one where |Im √W| < π: there the root is the point one started from."""
    a = 0.5 / eps
    s = complex(s_real + max(0.0, a - 5), s_imag)
    theta = eps * s * s - 0.25 / eps
    value, slope = psi_scalar(theta, eps)
    found = Inverse.of(eps).root(value)
    rounding = 1e-14 * (abs(value) + abs(lambda_min(eps))) / abs(slope)
    assert abs(found - theta) < 1e-12 * (abs(theta) + 0.25 / eps) + rounding


@given(epsilons, st.floats(-12, 8))
def test_real_values_above_the_edge_have_real_roots(eps, log_distance):
    inverse = Inverse.of(eps)
    theta = inverse.root(inverse.edge + 10**log_distance)
    assert theta.imag == 0
    assert theta.real >= inverse.at_edge


def test_steps_that_are_too_long_are_shortened(monkeypatch):
    """One arc for the whole half circle: Newton alone would land on other sheets."""
    values = [-2 + 0.1j, -50 + 1j, -1e4 + 1j, -0.5 + 0.01j]
    roots = {eps: [Inverse.of(eps).root(value) for value in values] for eps in (0.05, 1.0, 20.0)}
    monkeypatch.setattr(scalar, "STEPS", 1)
    for eps, expected in roots.items():
        found = [Inverse.of(eps).root(value) for value in values]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("eps", [0.05, 1.0, 20.0])
def test_below_the_edge_the_upper_root_is_taken(eps):
    inverse = Inverse.of(eps)
    assert inverse.root(inverse.edge) == inverse.at_edge
    for value in (inverse.edge * (1 + 1e-6), -2.0, -1e3):
        assert inverse.root(value).imag > 0


@pytest.mark.parametrize("eps", [0.01, 0.5, 10.0])
@pytest.mark.parametrize("theta", [0.3, -5.0, 1 + 2j, -30 + 0.1j])
def test_value_and_slope_in_high_precision(theta, eps):
    with mp.workdps(60):
        e = mp.mpf(eps)

        def exact(z):
            s = mp.sqrt(1 / (4 * e * e) + z / e)
            return mp.exp(-1 / (2 * e)) * (mp.cosh(s) + mp.sinh(s) / (2 * e * s))

        value, slope = exact(mp.mpc(theta)), mp.diff(exact, mp.mpc(theta))
    found, found_slope = psi_scalar(theta, eps)
    noise = 4e-16 * float(abs(slope)) * (abs(theta) + 0.25 / eps)
    assert abs(found - complex(value)) < 1e-14 * float(abs(value)) + noise
    assert abs(found_slope - complex(slope)) < 1e-12 * float(abs(slope))
