"""The kernels in C and in Triton give the bits of the reference; Triton's on a GPU where there is one, else in its interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from bodies import bits, carried, like, state, step_both
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograde.arithmetic import cpu, native, reference
from retrograde.arithmetic.fixed import FixedPoint
from retrograde.arithmetic.kernels import kernels_for
from retrograde.arithmetic.ratio import LIMIT

try:
    from retrograde.arithmetic import cuda
except ModuleNotFoundError:
    cuda = None  # type: ignore[assignment]

GPU = torch.cuda.is_available()
OURS = ["cpu", *(["cuda"] if cuda is not None else [])]
NINE_TENTHS = Fraction(9, 10)
INTEGERS = [torch.int32, torch.int16]
ratios = st.one_of(
    st.sampled_from([NINE_TENTHS, Fraction(99, 100), Fraction(1, 10), Fraction(1), Fraction(0)]),
    st.integers(1, 18).map(lambda k: Fraction(1, 2**k)),
    st.tuples(st.integers(1, LIMIT - 1), st.integers(2, LIMIT - 1)).map(lambda p: Fraction(min(p), max(p))),
)


def ours(name: str) -> tuple[Any, str]:
    """The kernels, and where they run."""
    return (cpu.kernels(torch.int32), "cpu") if name == "cpu" else (cuda, "cuda" if GPU else "cpu")


def dtypes(name: str) -> list[torch.dtype]:
    """The interpreter cuts float32 to bfloat16 where the GPU, and torch, round."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if name == "cpu" or GPU else [])]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_which_kernels_run_where() -> None:
    x = torch.zeros(4)
    assert kernels_for(x) == kernels_for(torch.nn.Parameter(x)) == cpu.kernels(torch.int32)
    assert kernels_for(x, torch.int64).digest == kernels_for(x).digest
    assert kernels_for(x, torch.int64).advance is cpu.advance
    assert kernels_for(x.to("meta")) is reference.KERNELS


def test_the_c_kernels_are_there() -> None:
    """This machine has a compiler: else the tests below compare the reference with itself."""
    assert native.function("advance") is not None


def test_the_c_kernels_refuse_a_dtype_that_they_do_not_know() -> None:
    x, v, i, y, out = state(NINE_TENTHS, (7,), torch.uint8, "contiguous", torch.float32, 0)
    before, advance = x.clone(), cpu.kernels(torch.int32).advance
    with pytest.raises(TypeError, match="do not take tensors of this dtype"):
        advance(x, v, i, y.double(), torch.float32, 9, 10, 1.0, 1.0, 0, 0, out, torch.zeros(2), None, None, 0)
    with pytest.raises(AttributeError):  # what is not a tensor
        advance(x, v, i, "y", torch.float32, 9, 10, 1.0, 1.0, 0, 0, out, torch.zeros(2), None, None, 0)
    assert torch.equal(x, before)


def sizes(name: str) -> list[tuple[int, ...]]:
    small = [(0,), (1,), (7,), (3, 5), (2, 3, 4, 5)]
    return [*small, (65_537,), (2, 70_000)] if name == "cpu" else [*small, (1_025,), (2, 3_000)]


@settings(max_examples=80)
@given(
    gamma=ratios, data=st.data(), width=st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    layout=st.sampled_from(["contiguous", "channels_last", "other"]), seen=st.sampled_from([None, torch.float32]),
    form=st.integers(0, 2), guard=st.integers(0, 20), seed=st.integers(0, 10**6), integers=st.sampled_from(INTEGERS),
)  # fmt: skip
@pytest.mark.parametrize("name", OURS)
def test_steps_have_the_bits_of_the_reference(
    name: str, gamma: Fraction, data: st.DataObject, width: torch.dtype, layout: str, seen: torch.dtype | None, form: int, guard: int,
    seed: int, integers: torch.dtype,
) -> None:  # fmt: skip
    module, device = ours(name)
    shape = data.draw(st.sampled_from(sizes(name)))
    dtype = data.draw(st.sampled_from([*dtypes(name), *([torch.float64] if name == "cpu" else [])]))
    if gamma.denominator - 1 > torch.iinfo(width).max:
        width = torch.int32
    guard = guard if integers == torch.int32 else guard % 7
    s = tuple(t if t is None else t.to(device) for t in state(gamma, shape, width, layout, dtype, seed, integers, seen))
    bits = gamma.denominator.bit_length() - 1 if gamma == Fraction(1, 1 << gamma.denominator.bit_length() - 1) else 0
    over = data.draw(st.integers(0, max(bits - 1, 0)))
    found, wanted = step_both(module, s, gamma, form, guard, over)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if gamma:
        for a, b in zip(found[-3:], s[:3], strict=True):
            assert a is None or torch.equal(a, b), "a step back does not undo a step"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", [0, 1, 2])
def test_steps_by_several_threads(form: int) -> None:
    for integers in INTEGERS:
        s = state(NINE_TENTHS, (3, 70_001), torch.uint8, "contiguous", torch.float32, 3, integers)
        found, wanted = step_both(cpu.kernels(integers), s, NINE_TENTHS, form, 3)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "gamma", [Fraction(n, d) for d in (2, 4, 8, 10, 100, 1024, 32749) for n in {1, d // 2 + 1, d - 1}]
)
@pytest.mark.parametrize("name", OURS)
def test_steps_at_the_ends_of_the_range(name: str, gamma: Fraction) -> None:
    """v at both ends, and beside multiples of the denominator next to them."""
    module, device = ours(name)
    d = gamma.denominator
    ends = [s * (2**30 - k) for s in (1, -1) for k in (0, 1, 2, 3, 2**30 % d, 2**30 % d + 1, d, d + 1)]
    v = torch.tensor(ends, dtype=torch.int32)
    x, i, y = torch.zeros_like(v), torch.full_like(v, 3), torch.zeros(len(v))
    s = tuple(t.to(device) for t in (x, v, i, y, torch.empty_like(y)))
    found, wanted = step_both(module, s, gamma, 0, 5)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(found[-2], s[1])


@pytest.mark.usefixtures("threads")
def test_shifts_by_several_threads() -> None:
    s = state(Fraction(1, 8), (3, 70_001), torch.uint8, "contiguous", torch.float32, 3)
    for over in (0, 2):
        found, wanted = step_both(cpu.kernels(torch.int32), s, Fraction(1, 8), 0, 3, over)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e12])
@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("integers", INTEGERS)
@pytest.mark.parametrize("name", OURS)
def test_the_watch_sees_what_is_not_finite_or_too_large(
    name: str, integers: torch.dtype, form: int, poison: float
) -> None:
    module, device = ours(name)
    size = 100_000 if name == "cpu" else 3_000
    x, v, i, y, out = (
        t.to(device) for t in state(NINE_TENTHS, (size,), torch.int32, "contiguous", torch.float32, 0, integers)
    )
    before = [t.clone() for t in (x, v, i)]
    y[size - 655] = poison
    watch = torch.zeros(2, device=device)
    step = (y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, form, 3)
    module.advance(x, v, i, *step, out, watch, None, None, 0)
    limit = FixedPoint(20, integers).limit
    assert (watch[0] <= limit) == (form == 2 and poison == -float("inf"))  # a relu makes 0 of that
    module.pull(x, v, 2.0**-20, 3, out)
    module.retreat(x, v, i, *step, None, None, 0)
    assert all(map(torch.equal, (x, v, i), before)), "a step that is refused can be undone"


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e12])
@pytest.mark.parametrize("name", OURS)
def test_the_watch_sees_a_start_that_is_not_finite_or_too_large(name: str, poison: float) -> None:
    module, device = ours(name)
    x = torch.randn(3_000).to(device)
    x[2_345] = poison
    watch = torch.zeros(2, device=device)
    module.encode(x, 2.0**20, torch.empty_like(x, dtype=torch.int32), watch, 1)
    assert not watch[1] <= 2.0**30
    assert watch[0] == 0


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1_500), (2, 70_001), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", OURS)
def test_gradients_are_carried_with_the_same_bits(name: str, shape: tuple[int, ...], form: int) -> None:
    module, device = ours(name)
    if name == "cuda" and shape == (2, 70_001) and not GPU:
        shape = (2, 2_001)
    for dtype in dtypes(name):
        for carried_in in dtypes(name):
            for found, wanted in carried(module, shape, dtype, carried_in, form, device):
                assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 31, 1_023, 5_000, 300_001])
@pytest.mark.parametrize("name", OURS)
def test_the_hash_is_the_one_defined(name: str, dtype: torch.dtype, size: int) -> None:
    module, device = ours(name)
    size = min(size, 300_001 if name == "cpu" or GPU else 6_001)
    t = torch.randint(0, 200, (size + 1,)).to(dtype).to(device)[size % 2 :]
    for seed, sign in ((0, 1), (1, -1), (77, 1)):
        found, wanted = (torch.full((), 5, dtype=torch.int64, device=device) for _ in range(2))
        module.digest(t, found, seed, sign)
        reference.digest(t, wanted, seed, sign)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("integers", INTEGERS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded"])
@pytest.mark.parametrize("name", OURS)
def test_a_start_is_encoded_and_decoded_with_the_same_bits(name: str, layout: str, integers: torch.dtype) -> None:
    module, device = ours(name)
    for dtype in dtypes(name):
        x = torch.randn(2, 3, 30, 20).to(dtype).to(device)
        if layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        elif layout == "expanded":
            x = x[:1].expand(2, -1, -1, -1)
        fixed = FixedPoint(20 if integers == torch.int32 else 9, integers)
        q = torch.empty_like(x, dtype=integers)
        watch = torch.zeros(1, 4, device=device)[0, :2]
        module.encode(like(q, x), 2.0**fixed.bits, q, watch, 1)
        assert torch.equal(q, fixed.encode(x))
        assert watch.tolist() == [
            0.0,
            x.abs().amax().to(torch.float32) * 2.0**fixed.bits if name == "cpu" else q.abs().max(),
        ]
        limit = torch.iinfo(integers).max
        q = torch.randint(-limit, limit, x.shape, dtype=integers).to(device)
        q[0, 0, 0, :3] = torch.tensor([-limit - 1, limit, 0])
        for source in (q if layout == "expanded" else like(x, q), q.transpose(2, 3)):
            target = torch.empty_like(source, dtype=dtype)
            module.decode(source, 2.0**-fixed.bits, target)
            assert torch.equal(target, fixed.decode(source, dtype))


@pytest.mark.parametrize("size", [1, 8, 1_025, 3_001, 70_001])
@pytest.mark.parametrize("name", OURS)
def test_a_relu_lets_through_what_torch_does(name: str, size: int) -> None:
    module, device = ours(name)
    size = min(size, 70_001 if name == "cpu" or GPU else 2_001)
    for dtype in dtypes(name):
        x, v, i, y, out = state(NINE_TENTHS, (size,), torch.int32, "contiguous", dtype, 0, seen=torch.float32)
        x = torch.where(torch.rand(size) < 0.3, 0, x)
        y[::7], y[::11], y[::13], y[::17] = float("nan"), 0.0, float("inf"), -0.0
        leaf = y.clone().requires_grad_()
        leaf.add(0).add_(x * 2.0**-20).relu().sum().backward()
        x, v, i, y, out = (t.to(device) for t in (x, v, i, y, out))
        mask, watch = bits(x), torch.zeros(2, device=device)
        module.advance(x, v, i, y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, 2, 3, out, watch, mask, None, 0)
        assert torch.equal(reference.unpacked(mask, x.shape, x.stride()).to(dtype).cpu(), leaf.grad)
        assert not mask.cpu()[-1] >> (size % 8 or 8), "bits beyond the last element"


@pytest.mark.skipif(cuda is None, reason="no Triton")
@given(st.integers(2, 2**15), st.integers(0, 2**31 - 1))
def test_quotients_by_reciprocal_are_exact(b: int, a: int) -> None:
    m, shift = cuda.reciprocal(b)
    assert m < 2**32
    for near in {a, a // b * b, max(a // b * b - 1, 0), 2**31 - 1}:
        assert (near * m >> 32) >> shift == near // b


@pytest.mark.skipif(cuda is None, reason="no Triton")
@pytest.mark.parametrize("size", [8 * 1024, 8 * 1024 + 1, 20_000, 41_000])
def test_a_program_may_hash_several_blocks(size: int) -> None:
    """As it does where there are very many words."""
    t = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device="cuda" if GPU else "cpu")
    found, wanted = (torch.zeros((), dtype=torch.int64, device=t.device) for _ in range(2))
    cuda._launch(cuda._digest, (t, found), size, (3, 1), 8, times=8)
    reference.digest(t, wanted, 3, 1)
    assert torch.equal(found, wanted)
