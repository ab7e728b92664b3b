"""The scalar inverse: a root, the right one, with its symmetries."""

import cmath
import math

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograde.theory.inverse as inverse_module
from retrograde.theory import lambda_min
from retrograde.theory.inverse import Inverse, psi_scalar

deterministic = settings(derandomize=True, deadline=None, max_examples=150)
epsilons = st.floats(-3, 3).map(lambda x: 10**x)
angles = st.floats(-math.pi, math.pi)


@deterministic
@given(epsilons, st.floats(-8, 6), angles)
def test_root_is_a_root_in_the_whole_plane(eps, log_radius, angle):
    inverse = Inverse.of(eps)
    value = inverse.edge + 10**log_radius * cmath.exp(1j * angle)
    theta = inverse.root(value)
    assert abs(psi_scalar(theta, eps)[0] - value) < 2e-14 * (abs(value) + abs(inverse.edge))
    assert inverse.root(value.conjugate()) == theta.conjugate() or value.imag == 0


@deterministic
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


@deterministic
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
    monkeypatch.setattr(inverse_module, "STEPS", 1)
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


def test_eps_zero_is_the_logarithm():
    assert Inverse.of(0.0).root(-2.0) == cmath.log(-2)
    assert Inverse.of(0.0).root(1 - 1j) == cmath.log(1 - 1j)
