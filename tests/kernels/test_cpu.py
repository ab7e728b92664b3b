"""The CPU bodies, compiled and not, give the bits of the plain-torch bodies."""

from fractions import Fraction

import pytest
import torch
from bodies import state, step_both
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
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    residual=st.booleans(),
    guard=st.integers(0, 20),
    seed=st.integers(0, 10**6),
    integers=st.sampled_from([torch.int32, torch.int16]),
)
@pytest.mark.parametrize("which", BODIES)
def test_same_bits_as_the_plain_bodies(
    which, gamma, shape, width, layout, dtype, residual, guard, seed, integers
) -> None:
    if gamma.denominator - 1 > torch.iinfo(width).max:
        width = torch.int32
    guard = guard if integers == torch.int32 else guard % 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        if which == "pieces":
            patch.setattr(native, "load", lambda: None)
        s = state(gamma, shape, width, layout, dtype, seed, integers)
        ours, theirs = step_both(cpu, s, gamma, residual, guard)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if gamma:
        for a, b in zip(ours[-3:], s[:3], strict=True):
            assert a is None or torch.equal(a, b), "a step back does not undo a step"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e12])
@pytest.mark.parametrize("residual", [False, True])
def test_the_watch_sees_what_is_not_finite_or_too_large(body: str, poison: float, residual: bool, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, v, i, y, out = state(Fraction(9, 10), (100_000,), torch.int32, "contiguous", torch.float32, 0)
    y[77_777] = poison
    watch = torch.zeros(2)
    cpu.advance_(x, v, i, y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, residual, 3, out, watch)
    assert not watch[0] <= 2.0**30


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
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 70_001), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("carried_in", [torch.float32, torch.bfloat16])
def test_gradients_are_carried_with_the_same_bits(which, residual, shape, dtype, carried_in, monkeypatch) -> None:
    if which == "pieces":
        monkeypatch.setattr(native, "load_carry", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    p, h, d = torch.randn(shape).to(carried_in), torch.randn(shape).to(carried_in), torch.randn(shape).to(dtype)
    for carried in ((p, h), (None, h), (p, None), (None, None)):
        for wanted in (True, False):
            found = []
            for body in (cpu.carry, None):
                p_, h_, d_ = (None if t is None else t.clone() for t in (*carried, d))
                gy = torch.empty(shape, dtype=carried_in)
                cast = gy if dtype == carried_in else torch.empty(shape, dtype=dtype)
                out = None if not wanted else torch.empty(shape, dtype=carried_in) if p_ is None else p_
                factors = (9.0, 0.7, 0.1, residual)
                if body is None or not body(p_, h_, d_, factors, out, gy, cast):
                    graph.carry(p_, h_, d_, factors, out, gy)
                    cast.copy_(gy)
                found.append([gy, cast, *([out] if wanted else [])])
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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
