"""Peak and held bytes, against allocation patterns whose figures are known."""

import os

import pytest
import torch

from retrograde.memory import Peak, held_bytes, peak_memory

MB = 1_000_000


def empty(megabytes: float) -> torch.Tensor:
    return torch.empty(int(megabytes * MB), dtype=torch.uint8)


def test_known_pattern() -> None:
    def pattern() -> torch.Tensor:
        a, b = empty(3), empty(2)
        del a  # 2 MB
        c = empty(4)  # 6 MB, the peak
        del b
        return c

    assert peak_memory(pattern) == Peak(peak=6 * MB, held=4 * MB)


def test_then_counts_for_the_peak_and_not_for_what_is_held() -> None:
    assert peak_memory(lambda: empty(2), lambda kept: empty(5)) == Peak(peak=7 * MB, held=2 * MB)


def test_what_then_frees_is_not_counted_twice() -> None:
    def then(kept: list[torch.Tensor]) -> None:
        kept.clear()
        empty(1)

    assert peak_memory(lambda: [empty(2)], then) == Peak(peak=2 * MB, held=2 * MB)


def test_a_kernels_temporary_is_seen() -> None:
    x = torch.rand(100_000)
    peak = peak_memory(lambda: torch.sort(x).values)  # int64 indices are made and dropped
    assert peak.held == 4 * x.numel()
    assert peak.peak >= (4 + 8) * x.numel()


@pytest.mark.parametrize("allocated", ["before any measurement", "in an earlier one"])
def test_frees_of_earlier_memory_do_not_count(allocated: str) -> None:
    early = []
    if allocated == "in an earlier one":  # the profiler knows the size of these, and reports their end
        peak_memory(lambda: early.append(empty(8)))
    else:
        early.append(empty(8))

    def frees_then_allocates() -> torch.Tensor:
        early.clear()
        return empty(3)

    assert peak_memory(frees_then_allocates) == Peak(peak=3 * MB, held=3 * MB)


def test_held_are_the_tensors_autograd_saved() -> None:
    x = torch.ones(1000, requires_grad=True)
    with torch.no_grad():
        assert held_bytes(lambda: x.exp().exp()) == 4000
    assert held_bytes(lambda: x.exp().exp()) == 8000


def test_an_error_inside_passes_through_and_leaves_no_profiler_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 / 0)
    assert peak_memory(lambda: empty(1)).peak == MB


def test_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    peak_memory(lambda: None)
    assert dict(os.environ) == before


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="CPU or a CUDA device; got 'meta'"):
        peak_memory(lambda: None, device="meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_known_pattern_on_a_gpu() -> None:
    def pattern() -> torch.Tensor:
        a = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        b = torch.empty(2**21, dtype=torch.uint8, device="cuda")
        del a
        return b

    assert peak_memory(pattern, device="cuda") == Peak(peak=3 * 2**20, held=2**21)


def test_one_measurement_at_a_time() -> None:
    """The outer one would see nothing of what the inner one has seen."""
    with pytest.raises(RuntimeError, match="Measure outside of it"):
        peak_memory(lambda: peak_memory(lambda: torch.ones(10)))
    assert peak_memory(lambda: torch.ones(10)).peak == 40
