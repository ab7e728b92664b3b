"""The hash that tells a replay from another: every bit and every place counts, layouts do not."""

import pytest
import torch
from torch import Tensor

from retrograde.arithmetic import reference
from retrograde.arithmetic.kernels import digest


def checksum(t: Tensor) -> int:
    return int(digest(t))


def defined(t: Tensor) -> Tensor:
    found = torch.zeros((), dtype=torch.int64)
    reference.digest(t, found, 0, 1)
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int16, torch.bool]
)
def test_every_element_counts(dtype: torch.dtype) -> None:
    t = torch.randint(0, 2, (1_037,)).to(dtype)
    found = {checksum(t)}
    for k in range(t.numel()):
        other = t.clone()
        other[k] = 1 - other[k].to(torch.int64).item() if dtype == torch.bool else other[k] + 1
        found.add(checksum(other))
    assert len(found) == t.numel() + 1


def test_every_place_and_every_bit_counts() -> None:
    t = torch.randn(4_096)
    moved = {checksum(t.roll(k)) for k in range(512)}
    assert len(moved) == 512
    bits = t.view(torch.int32)
    assert len({checksum((bits ^ (1 << k)).view(torch.float32)) for k in range(31)} | {checksum(t)}) == 32
    assert checksum(torch.zeros(64)) != checksum(torch.zeros(80))


def test_no_pattern_among_many_near_tensors() -> None:
    """Neither half of the hash alone tells most of them apart by chance: there are no collisions where none are expected."""
    hashes = torch.stack([defined(torch.full((16,), k)) for k in range(20_000)])
    assert hashes.unique().numel() == 20_000
    assert (hashes & (2**32 - 1)).unique().numel() > 19_980
    assert (hashes >> 32).unique().numel() > 19_980


def _layouts() -> list[Tensor]:
    t = torch.randn(4, 6, 8, 10)
    wide = torch.randn(4, 6, 8, 20)
    return [
        t.contiguous(memory_format=torch.channels_last), t.transpose(1, 3), t[1:, ::2], wide[..., ::2], t[:1].expand(4, -1, -1, -1),
        torch.randn(99).bfloat16()[1:], torch.tensor(3.0), torch.empty(0),
    ]  # fmt: skip


@pytest.mark.parametrize("t", _layouts(), ids=range(8))
def test_any_layout(t: Tensor) -> None:
    """The same for a copy of the same layout; what lies between the elements does not count."""
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) if 0 not in t.stride() else t.clone()
    copy = copy.fill_(7).copy_(t) if 0 not in t.stride() else t
    assert checksum(copy) == checksum(t)


@pytest.mark.parametrize("size", [7, 1_037])
def test_views_that_are_yet_to_be_conjugated_or_negated(size: int) -> None:
    """Their values count, not the memory that they are views of."""
    z = torch.randn(size, dtype=torch.complex64)
    conjugated = z.conj()
    assert conjugated.is_conj()
    assert checksum(conjugated) == checksum(conjugated.resolve_conj()) != checksum(z)
    for negated in (z.conj().imag, torch._neg_view(torch.randn(size))):  # with gaps, and without
        assert negated.is_neg()
        assert checksum(negated) == checksum(negated.resolve_neg()) != checksum(-negated)


def test_it_adds_and_takes_off() -> None:
    a, b = torch.randn(100), torch.randn(33)
    total = digest(b, digest(a), seed=1)
    assert total != 0
    digest(a, total, sign=-1)
    digest(b, total, seed=1, sign=-1)
    assert total == 0
    assert digest(a, seed=1) != digest(a)
