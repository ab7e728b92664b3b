"""The CPU bodies, compiled and not, give the bits of the plain-torch bodies."""

from fractions import Fraction

import pytest
import torch
from bodies import bits, carried, state, step_both
from hypothesis import given, settings
from hypothesis import strategies as st
from ratios import ratios

from retrograde.core import verify
from retrograde.kernels import cpu, native
from retrograde.stack import graph

BODIES = ["compiled", "pieces"]


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pieces":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C compiler on this machine")
    return request.param


@settings(max_examples=60)
@given(
    gamma=ratios,
    shape=st.sampled_from([(0,), (1,), (7,), (3, 5), (2, 3, 4, 5), (65_537,), (2, 70_000)]),
    width=st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    layout=st.sampled_from(["contiguous", "channels_last", "other"]),
    seen=st.sampled_from([None, torch.float32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    form=st.integers(0, 2),
    guard=st.integers(0, 20),
    seed=st.integers(0, 10**6),
    integers=st.sampled_from([torch.int32, torch.int16]),
)
@pytest.mark.parametrize("which", BODIES)
def test_same_bits_as_the_plain_bodies(
    which, gamma, shape, width, layout, dtype, seen, form, guard, seed, integers
) -> None:
    if gamma.denominator - 1 > torch.iinfo(width).max:
        width = torch.int32
    guard = guard if integers == torch.int32 else guard % 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        if which == "pieces":
            patch.setattr(native, "load", lambda: None)
        s = state(gamma, shape, width, layout, dtype, seed, integers, seen)
        ours, theirs = step_both(cpu, s, gamma, form, guard)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if gamma:
        for a, b in zip(ours[-3:], s[:3], strict=True):
            assert a is None or torch.equal(a, b), "a step back does not undo a step"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e12])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_the_watch_sees_what_is_not_finite_or_too_large(body: str, poison: float, form: int, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, v, i, y, out = state(Fraction(9, 10), (100_000,), torch.int32, "contiguous", torch.float32, 0)
    y[77_777] = poison
    watch = torch.zeros(2)
    cpu.advance_(x, v, i, y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, form, 3, out, watch)
    assert (watch[0] <= 2.0**30) == (form == 2 and poison == -float("inf"))  # a relu makes 0 of that


def test_the_operators_use_these_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(native, "load", lambda: called.append(1))
    x = torch.zeros(4, dtype=torch.int32)
    torch.ops.retrograde.pull_(x, x.clone(), 1.0, 0, torch.empty(4))
    assert called


def test_a_compiler_that_fails_is_no_harm(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._library.__wrapped__() is None
    assert not list((tmp_path / "retrograde").glob("*"))


@pytest.mark.parametrize("which", BODIES)
@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 70_001), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("carried_in", [torch.float32, torch.bfloat16])
def test_gradients_are_carried_with_the_same_bits(which, form, shape, dtype, carried_in, monkeypatch) -> None:
    if which == "pieces":
        monkeypatch.setattr(native, "load_carry", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for ours, theirs in carried(cpu.carry, shape, dtype, carried_in, form):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 31, 5_000, 300_001])
def test_the_hash_is_the_one_defined(dtype, size, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load_digest() is None:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    t = torch.randint(0, 200, (size + 1,)).to(dtype)[size % 2 :]
    for seed, sign in ((0, 1), (1, -1), (2**31 + 7, 1)):
        found = torch.full((), 5, dtype=torch.int64)
        assert cpu.digest(t, found, seed, sign)
        assert found == 5 + sign * verify.digest_ref(verify.words(t), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 8, 3_001, 70_001])
def test_a_relu_lets_through_what_torch_does(body: str, size: int, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, v, i, y, out = state(Fraction(9, 10), (size,), torch.int32, "contiguous", dtype, 0, seen=torch.float32)
    x = torch.where(torch.rand(size) < 0.3, 0, x)
    y[::7], y[::11], y[::13], y[::17] = float("nan"), 0.0, float("inf"), -0.0
    leaf = y.clone().requires_grad_()
    with torch.enable_grad():
        leaf.add(0).add_(x * 2.0**-20).relu().sum().backward()
    x, v, i, y, out = (t.to("cpu") for t in (x, v, i, y, out))
    mask, watch = bits(x), torch.zeros(2, device="cpu")
    cpu.advance_(x, v, i, y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, 2, 3, out, watch, mask)
    assert torch.equal(graph.unpacked(mask, x.shape, x.stride()).to(dtype).cpu(), leaf.grad)
    assert not mask.cpu()[-1] >> (size % 8 or 8), "bits beyond the last element"
