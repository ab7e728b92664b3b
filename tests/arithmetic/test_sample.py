"""Samples hashed by compiled code have the hash of the elements, gathered."""

import pytest
import torch
from torch import Tensor

from retrograde.arithmetic.kernels import digest, sampler

pytestmark = pytest.mark.skipif(sampler("cpu") is None, reason="no compiled kernels")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


def sample(tensors: list[Tensor], count: int, step: int, into: Tensor, sign: int) -> None:
    compiled = sampler("cpu")
    assert compiled is not None
    for seed, t in enumerate(tensors):
        compiled(t, count, step, into, seed, sign)


@pytest.mark.parametrize(("count", "step"), [(5, 1), (256, 1), (256, 7), (511, 3), (0, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_is_that_of_the_elements_in_a_row(dtype: torch.dtype, count: int, step: int) -> None:
    t = torch.randint(256, (3000,)).to(dtype)
    hashed = torch.zeros((), dtype=torch.int64)
    sample([t], count, step, hashed, 1)
    assert hashed == digest(t[: count * step : step].contiguous())
    sample([t], count, step, hashed, -1)
    assert hashed == 0


def test_tensors_are_told_apart_by_their_order() -> None:
    a, b = torch.randn(2, 300).unbind()
    first, second = torch.zeros(2, dtype=torch.int64).unbind()
    sample([a, b], 300, 1, first, 1)
    sample([b, a], 300, 1, second, 1)
    assert first != second
