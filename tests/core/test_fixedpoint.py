import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrograde.core.fixedpoint import FixedPoint, integer_dtype
from retrograde.stack.headroom import HEADROOM, calibrated, follow


@given(st.integers(-(2**30), 2**30), st.integers(-20, 40))
def test_decoding_then_encoding_changes_nothing_that_fits_a_float(q: int, bits: int) -> None:
    fixed = FixedPoint(bits, torch.int64)
    value = torch.tensor([q])
    assert torch.equal(fixed.encode(fixed.decode(value, torch.float64)), value)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_calibration_leaves_the_headroom(peak_x: float, peak_v: float) -> None:
    for dtype in (torch.int32, torch.int64):
        fixed = calibrated(peak_x, peak_v, dtype)
        free_x = fixed.limit / (peak_x * 2.0**fixed.bits)
        free_v = fixed.limit / (peak_v * 2.0 ** (fixed.bits + fixed.guard))
        assert min(free_x, free_v) >= 2**HEADROOM
        assert min(free_x, free_v) <= 2 ** (HEADROOM + 1)
        assert 0 <= fixed.guard <= 20


def test_calibration_of_nothing_is_usable() -> None:
    for fixed in (calibrated(0.0, 0.0, torch.int32), calibrated(1e-300, 0.0, torch.int32)):
        assert torch.isfinite(torch.tensor(2.0 ** (fixed.bits + fixed.guard), dtype=torch.float32))


def test_the_range_follows_the_activations() -> None:
    fixed = calibrated(1.0, 0.1, torch.int32)
    largest = fixed.limit * 2.0**-fixed.bits
    assert follow(fixed, 1.0, 0.1) is fixed
    assert follow(fixed, largest / 3, 0.1) is fixed
    wider = follow(fixed, largest / 1.5, 0.1)
    assert wider.limit * 2.0**-wider.bits >= 4 * largest / 1.5
    assert follow(fixed, largest / 1000, 0.0001).bits > fixed.bits
    assert follow(fixed, 1.0, 1.0).guard < fixed.guard


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_integers_for_each_float(dtype: torch.dtype) -> None:
    assert integer_dtype(dtype) == (torch.int64 if dtype == torch.float64 else torch.int32)
