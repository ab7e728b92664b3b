"""Exact multiplication, over the whole range of values and on both sides of every limit."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithm1 import divide_ref, multiply_ref
from retrograde.arithmetic.buffers import next_bound
from retrograde.arithmetic.multiply import multiply, pop, push, shift
from retrograde.arithmetic.ratio import LIMIT

ratios = st.tuples(st.integers(1, LIMIT - 1), st.integers(2, LIMIT - 1)).map(lambda p: Fraction(min(p), max(p)))
small_ratios = st.fractions(Fraction(1, 50), 1, max_denominator=200).filter(lambda g: 0 < g < 1)
values = st.lists(
    st.one_of(st.integers(-(2**30), 2**30), st.sampled_from([0, -1, 1, 2**30, -(2**30), 2**31 - 1, -(2**31)])),
    min_size=1,
    max_size=20,
)


@given(values, ratios, st.data())
def test_exchanging_n_and_d_undoes_multiply_for_any_buffer(v: list[int], gamma: Fraction, data: st.DataObject) -> None:
    n, d = gamma.numerator, gamma.denominator
    digits = st.integers(0, 2**31 // d - 1)  # what leaves room for one more digit
    i = torch.tensor(data.draw(st.lists(digits, min_size=len(v), max_size=len(v))), dtype=torch.int32)
    before = torch.tensor(v, dtype=torch.int32)
    after, buffer = multiply(before, i, n, d)
    back, emptied = multiply(after, buffer, d, n)
    assert torch.equal(back, before)
    assert torch.equal(emptied, i)


@given(values, st.integers(1, 18), st.data())
def test_shifts_are_the_multiplication_by_a_power_of_two(v: list[int], k: int, data: st.DataObject) -> None:
    """Also where the digit is divided between two buffers."""
    over = data.draw(st.integers(0, k - 1))
    digits = st.lists(st.integers(0, 2**31 // 2**k - 1), min_size=len(v), max_size=len(v))
    i = torch.tensor(data.draw(digits), dtype=torch.int32)
    start = torch.tensor(v, dtype=torch.int32)
    wanted, whole = multiply(start, i, 1, 2**k)
    now, first, second = start.clone(), i.clone(), torch.zeros_like(i)
    push(now, second if over else first, k, first if over else None, over)
    assert torch.equal(now, wanted)
    low, high = start & (1 << over) - 1, (start >> over) & (1 << k - over) - 1
    assert torch.equal(first, (i << over) + low if over else whole)
    assert torch.equal(second, high if over else torch.zeros_like(i))
    pop(now, second if over else first, k, first if over else None, over)
    assert torch.equal(now, start)
    assert torch.equal(first, i)
    assert not second.any()


def test_which_ratios_are_shifts() -> None:
    found = {(n, d): shift(n, d) for n in range(70) for d in range(1, 70)}
    powers = {2**k: k for k in range(1, 7)}
    wanted = {(1, d): k for d, k in powers.items()} | {(n, 1): -k for n, k in powers.items()}
    assert {ratio: k for ratio, k in found.items() if k} == wanted


@given(values, ratios)
def test_the_product_is_within_one_unit(v: list[int], gamma: Fraction) -> None:
    product, _ = multiply(torch.tensor(v), torch.zeros(len(v), dtype=torch.int64), gamma.numerator, gamma.denominator)
    assert all(abs(q - gamma * a) < 1 for q, a in zip(product.tolist(), v, strict=True))


@given(values, small_ratios, st.integers(1, 60))
def test_many_steps_stay_within_the_bound_and_come_back(v: list[int], gamma: Fraction, depth: int) -> None:
    n, d = gamma.numerator, gamma.denominator
    start = torch.tensor(v)
    now, i, bound, steps = start, torch.zeros_like(start), 0, 0
    for _ in range(depth):
        if next_bound(bound, gamma) >= 2**62:
            break
        bound, steps = next_bound(bound, gamma), steps + 1
        now, i = multiply(now, i, n, d)
        assert 0 <= int(i.min()) <= int(i.max()) <= bound
    for _ in range(steps):
        now, i = multiply(now, i, d, n)
    assert torch.equal(now, start)
    assert not i.any()


@given(values, small_ratios, st.integers(1, 20))
def test_algorithm_1_of_the_paper_is_exact_too(v: list[int], gamma: Fraction, depth: int) -> None:
    n, d = gamma.numerator, gamma.denominator
    depth = min(depth, int(60 / (d.bit_length() + 1)))
    start = torch.tensor(v)
    now, i = start, torch.zeros_like(start)
    for _ in range(depth):
        now, i = multiply_ref(now, i, n, d)
    for _ in range(depth):
        now, i = divide_ref(now, i, n, d)
    assert torch.equal(now, start)
    assert not i.any()


def test_algorithm_1_disturbs_v_by_n_units_and_ours_by_one() -> None:
    v = torch.arange(-100_000, 100_000)
    i = torch.randint(0, 2**20, v.shape)
    n, d = 9_999, 10_000
    error = [(m(v, i, n, d)[0] - v * (n / d)).abs().max().item() for m in (multiply_ref, multiply)]
    assert error[0] > 5_000
    assert error[1] < 1


def test_bits_that_the_buffer_needs_beyond_the_ideal() -> None:
    """k·log2(1/γ) bits are lost for good; ours needs log2(n·d) more per buffer."""
    gamma, bound = Fraction(9, 10), 0
    for _ in range(166):
        bound = next_bound(bound, gamma)
    ideal = 166 * (torch.log2(torch.tensor(10 / 9)).item())
    assert bound.bit_length() - ideal == pytest.approx(torch.log2(torch.tensor(90.0)).item(), abs=1)
