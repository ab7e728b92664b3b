"""The CPU bodies, compiled and not, give the bits of the plain-torch bodies."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrograde.core import ops as plain
from retrograde.core.rational import LIMIT, gain
from retrograde.kernels import cpu, native

BODIES = ["compiled", "pieces"]
ratios = st.one_of(
    st.sampled_from([Fraction(9, 10), Fraction(99, 100), Fraction(1, 2), Fraction(1, 10), Fraction(1), Fraction(0)]),
    st.tuples(st.integers(1, LIMIT - 1), st.integers(2, LIMIT - 1)).map(lambda p: Fraction(min(p), max(p))),
)


@pytest.fixture(params=BODIES)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pieces":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no C compiler on this machine")
    return request.param


def state(
    gamma: Fraction, shape: tuple[int, ...], width: torch.dtype, layout: str, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randint(-(2**29), 2**29, shape, generator=generator, dtype=torch.int32) for _ in range(2))
    room = min(torch.iinfo(width).max // gamma.denominator, 2**20)  # leaves a place for the next digit
    i = torch.randint(0, max(room, 1), shape, generator=generator).to(width) if gamma.denominator > 1 else None
    y = torch.randn(shape, generator=generator).mul_(10 ** (seed % 3)).to(dtype)
    if layout == "channels_last" and len(shape) == 4:
        x, v, y = (t.contiguous(memory_format=torch.channels_last) for t in (x, v, y))
        i = None if i is None else i.contiguous(memory_format=torch.channels_last)
    if layout == "other":
        y = y.transpose(0, -1).contiguous().transpose(0, -1)
    return x, v, i, y, torch.empty_like(x, dtype=dtype)


def step_both(ours: object, state_: tuple, gamma: Fraction, residual: bool, guard: int) -> tuple[list, list]:
    """State after a step on and a step back, by our bodies and by the plain ones."""
    found = []
    for module in (ours, plain):
        x, v, i, y, out = (None if t is None else t.clone() for t in state_)
        watch = torch.zeros(2)
        n, d = gamma.numerator, gamma.denominator
        step = (y, out.dtype, n, d, float(gain(gamma)) * 2.0**20, 2.0**-20, residual)
        module.advance_(x, v, i, *step, guard, out, watch)
        trace = [t if t is None else t.clone() for t in (x, v, i, out, watch)]
        if n:
            module.pull_(x, v, 2.0**-20, guard, out)
            trace.append(out.clone())
            module.retreat_(x, v, i, *step)
            trace += [x, v, i]
        found.append(trace)
    return found[0], found[1]


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
)
@pytest.mark.parametrize("which", BODIES)
def test_same_bits_as_the_plain_bodies(which, gamma, shape, width, layout, dtype, residual, guard, seed) -> None:
    if gamma.denominator - 1 > torch.iinfo(width).max:
        width = torch.int32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        if which == "pieces":
            patch.setattr(native, "load", lambda: None)
        s = state(gamma, shape, width, layout, dtype, seed)
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
    assert native.load.__wrapped__() is None
    assert not list((tmp_path / "retrograde").glob("*"))
