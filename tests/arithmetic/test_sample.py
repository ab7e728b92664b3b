"""Samples hashed by compiled code have the hash of the elements, gathered."""

import pytest
import torch

from retrograde.arithmetic.hash import digest
from retrograde.arithmetic.sample import Groups, can_sample, sample

pytestmark = pytest.mark.skipif(not can_sample(), reason="no compiled kernels")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("groups", [(1, 0, 5), (1, 0, 256), (256, 7, 1), (511, 3, 1), (3, 11, 4), (0, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_is_that_of_the_elements_in_a_row(dtype: torch.dtype, groups: Groups) -> None:
    count, step, together = groups
    t = torch.randint(256, (3000,)).to(dtype)
    gathered = t.as_strided((count, together), (step, 1)).reshape(-1)
    hashed = torch.zeros((), dtype=torch.int64)
    sample([t], [groups], hashed, 1)
    assert hashed == digest(gathered)
    sample([t], [groups], hashed, -1)
    assert hashed == 0


def test_tensors_are_told_apart_by_their_order() -> None:
    a, b = torch.randn(2, 300).unbind()
    first, second = torch.zeros(2, dtype=torch.int64).unbind()
    sample([a, b], [(1, 0, 300)] * 2, first, 1)
    sample([b, a], [(1, 0, 300)] * 2, second, 1)
    assert first != second
