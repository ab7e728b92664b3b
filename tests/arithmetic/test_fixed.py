import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import retrograde as rg
from retrograde.arithmetic.fixed import FixedPoint, integer_dtype


@given(st.integers(-(2**30), 2**30), st.integers(-20, 40))
def test_decoding_then_encoding_changes_nothing_that_fits_a_float(q: int, bits: int) -> None:
    fixed = FixedPoint(bits, torch.int64)
    value = torch.tensor([q])
    assert torch.equal(fixed.encode(fixed.decode(value, torch.float64)), value)
    assert torch.equal(fixed.encode(fixed.decode(value, torch.float64, guard=3), guard=3), value)


@given(st.integers(-(2**14), 2**14), st.integers(-5, 20))
def test_16_bits_too(q: int, bits: int) -> None:
    fixed = FixedPoint(bits, torch.int16)
    value = torch.tensor([q], dtype=torch.int16)
    assert torch.equal(fixed.encode(fixed.decode(value, torch.float32)), value)
    assert abs(q) <= fixed.limit == 2**14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_integers_for_each_float(dtype: torch.dtype) -> None:
    assert integer_dtype(dtype) == (torch.int64 if dtype == torch.float64 else torch.int32)
    assert integer_dtype(dtype, narrow=True) == (torch.int64 if dtype == torch.float64 else torch.int16)


def test_it_is_a_public_name() -> None:
    assert rg.FixedPoint is FixedPoint
