"""Where information buffers begin: every bound fits, nothing smaller would do, and least is moved."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrograde.arithmetic.buffers import buffers, next_bound, powers, straddles

NINE_TENTHS = Fraction(9, 10)
WIDTHS = (torch.uint8, torch.int16, torch.int32)


def held(begins: dict[int, torch.dtype | None]) -> int:
    return sum(dtype.itemsize for dtype in begins.values() if dtype)


def moved(begins: dict[int, torch.dtype | None], depth: int) -> int:
    ends = [*list(begins)[1:], depth]
    return sum((e - s) * dtype.itemsize for (s, dtype), e in zip(begins.items(), ends, strict=True) if dtype)


def fits(begins: dict[int, torch.dtype | None], gammas: list[Fraction]) -> bool:
    dtype, bound = None, 0
    for k, gamma in enumerate(gammas):
        if k in begins:
            dtype, bound = begins[k], 0
        bound = next_bound(bound, gamma)
        if bound > (torch.iinfo(dtype).max if dtype else 0):
            return False
    return True


@pytest.mark.parametrize(
    ("depth", "begins"),
    [
        (16, {0: torch.uint8}),
        (24, {0: torch.uint8, 16: torch.uint8}),
        (61, {0: torch.int16}),
        (77, {0: torch.uint8, 16: torch.int16}),
        (96, {0: torch.int16, 61: torch.int16}),
        (166, {0: torch.int32}),
        (167, {0: torch.uint8, 16: torch.int32}),
    ],
)
def test_layouts_at_nine_tenths(depth: int, begins: dict[int, torch.dtype]) -> None:
    assert buffers([NINE_TENTHS] * depth) == begins


def test_no_buffer_without_a_multiplication() -> None:
    assert buffers([Fraction(1)] * 5) == {0: None}


@given(st.lists(st.fractions(0, 1, max_denominator=2**12), min_size=1, max_size=60).filter(lambda g: not straddles(g)))
def test_every_bound_fits_its_dtype_where_gamma_differs(gammas: list[Fraction]) -> None:
    assert fits(buffers(gammas), gammas)


@given(
    st.fractions(0, 1, max_denominator=2**12).filter(lambda g: 0 < g < 1 and not straddles([g] * 8)),
    st.integers(1, 300),
)
def test_every_bound_fits_its_dtype(gamma: Fraction, depth: int) -> None:
    assert fits(buffers([gamma] * depth), [gamma] * depth)


@given(st.one_of(st.integers(0, 8).map(lambda k: [k] * 100), st.lists(st.integers(0, 8), min_size=1, max_size=100)))
def test_powers_of_two_hold_their_bits_and_no_more(bits: list[int]) -> None:
    """k a layer, byte after byte: no bit is left free but in the last one."""
    gammas = [Fraction(1, 2**k) for k in bits]
    begins, over = buffers(gammas), straddles(gammas)
    assert powers(gammas) == bits
    assert held(begins) == -(-sum(bits) // 8)
    assert set(over) <= set(begins)
    full: list[int] = []  # bits in each byte
    for k, more in enumerate(bits):
        if k in over:
            full[-1] += over[k]
        if begins.get(k):
            full.append(0)
        if more:
            full[-1] += more - over.get(k, 0)
    assert all(n == 8 for n in full[:-1])
    assert all(0 < n <= 8 for n in full)


@given(st.sampled_from([Fraction(1, 2), Fraction(1, 10), Fraction(3, 7)]), st.integers(1, 14))
def test_no_other_layout_holds_less_or_moves_less(gamma: Fraction, depth: int) -> None:
    """Against all layouts of up to three buffers, tried one by one."""
    gammas = [gamma] * depth
    ours = buffers(gammas)
    for cuts in product(range(depth), repeat=2):
        for dtypes in product(WIDTHS, repeat=3):
            other = dict(zip((0, *sorted(cuts)), dtypes, strict=True))
            if fits(other, gammas):
                assert (held(ours), moved(ours, depth)) <= (held(other), moved(other, depth))


def test_ten_thousand_layers_and_gammas_that_all_differ() -> None:
    gammas = [1 - Fraction(1, 1000 + k) for k in range(10_000)]
    assert fits(buffers(gammas), gammas)
