import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrograde.arithmetic.ratio import LIMIT, as_ratio, as_ratios, gain


@pytest.mark.parametrize(
    ("given", "ratio"),
    [(0.9, (9, 10)), (0.1, (1, 10)), (0.9999, (9999, 10000)), (1 / 3, (1, 3)), (0, (0, 1)), (1, (1, 1)), (0.5, (1, 2))],
)
def test_floats_become_the_ratio_they_were_meant_as(given: float, ratio: tuple[int, int]) -> None:
    assert as_ratio(given) == Fraction(*ratio)


@pytest.mark.parametrize("depth", [1, 17, 62, 167, 1_000, 10_000])
def test_the_papers_gamma_is_exact_at_any_depth(depth: int) -> None:
    assert as_ratio(1 - 1 / (50 * depth)) == 1 - Fraction(1, 50 * depth)


@given(st.floats(1e-5, 1 - 1e-5))
def test_rounding_moves_gamma_and_its_complement_by_a_thousandth_at_most(gamma: float) -> None:
    ratio = as_ratio(gamma)
    assert ratio.denominator < LIMIT
    assert abs(ratio - Fraction(gamma)) <= min(Fraction(gamma), 1 - Fraction(gamma)) / 1000


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, math.inf, 1 - 1e-9, 1e-9, Fraction(1, LIMIT), Fraction(3, 2)])
def test_values_outside_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        as_ratio(wrong)


@pytest.mark.parametrize("wrong", ["0.9", None, True, 0.9j, torch.tensor(0.9)])
def test_what_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match="gamma"):
        as_ratio(wrong)


def test_one_gamma_per_layer() -> None:
    assert as_ratios([0.5, 0.9], 2) == (Fraction(1, 2), Fraction(9, 10))
    with pytest.raises(ValueError, match="3 values for 2 blocks"):
        as_ratios([0.1, 0.2, 0.3], 2)


def test_gain_is_one_minus_gamma_except_at_one() -> None:
    assert gain(Fraction(9, 10)) == Fraction(1, 10)
    assert gain(Fraction(1)) == 1


def test_a_gamma_to_be_learned_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot be learned.*Pass float\(gamma\)"):
        as_ratios(torch.nn.Parameter(torch.tensor(0.5)), 3)
    assert as_ratios(torch.tensor([0.5, 0.25]), 2) == (Fraction(1, 2), Fraction(1, 4))
