"""The Triton bodies give the bits of the plain-torch bodies: on a GPU where there is one, else in Triton's interpreter."""

from fractions import Fraction

import pytest
import torch
from bodies import bits, carried, state, step_both
from hypothesis import given, settings
from hypothesis import strategies as st
from ratios import ratios

from retrograde.core import verify
from retrograde.core.fixedpoint import FixedPoint
from retrograde.stack import graph

pytest.importorskip("triton")
cuda = pytest.importorskip("retrograde.kernels.cuda")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter cuts float32 to bfloat16 where the GPU, and torch, round
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@given(st.integers(2, 2**15), st.integers(0, 2**31 - 1))
def test_quotients_by_reciprocal_are_exact(b: int, a: int) -> None:
    m, shift = cuda.reciprocal(b)
    assert m < 2**32
    for near in {a, a // b * b, max(a // b * b - 1, 0), 2**31 - 1}:
        assert (near * m >> 32) >> shift == near // b


@settings(max_examples=40)
@given(
    gamma=ratios,
    shape=st.sampled_from([(0,), (1,), (7,), (3, 5), (2, 3, 4, 5), (1_025,), (2, 3_000)]),
    width=st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    layout=st.sampled_from(["contiguous", "channels_last", "other"]),
    seen=st.sampled_from([None, torch.float32]),
    dtype=st.sampled_from(DTYPES),
    form=st.integers(0, 2),
    guard=st.integers(0, 20),
    seed=st.integers(0, 10**6),
    integers=st.sampled_from([torch.int32, torch.int16]),
)
def test_same_bits_as_the_plain_bodies(gamma, shape, width, layout, dtype, seen, form, guard, seed, integers) -> None:
    if gamma.denominator - 1 > torch.iinfo(width).max:
        width = torch.int32
    guard = guard if integers == torch.int32 else guard % 7
    s = tuple(t if t is None else t.to(DEVICE) for t in state(gamma, shape, width, layout, dtype, seed, integers, seen))
    ours, theirs = step_both(cuda, s, gamma, form, guard)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    if gamma:
        for a, b in zip(ours[-3:], s[:3], strict=True):
            assert a is None or torch.equal(a, b), "a step back does not undo a step"


@pytest.mark.parametrize(
    "gamma", [Fraction(n, d) for d in (2, 4, 8, 10, 100, 1024, 32749) for n in {1, d // 2 + 1, d - 1}]
)
def test_the_ends_of_the_range_too(gamma: Fraction) -> None:
    """v at both ends, and beside multiples of the denominator next to them."""
    d = gamma.denominator
    ends = [s * (2**30 - k) for s in (1, -1) for k in (0, 1, 2, 3, 2**30 % d, 2**30 % d + 1, d, d + 1)]
    v = torch.tensor(ends, dtype=torch.int32)
    x, i, y = torch.zeros_like(v), torch.full_like(v, 3), torch.zeros(len(v))
    s = tuple(t.to(DEVICE) for t in (x, v, i, y, torch.empty_like(y)))
    ours, theirs = step_both(cuda, s, gamma, 0, 5)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[-2], s[1])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e12])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_the_watch_sees_what_is_not_finite_or_too_large(poison: float, form: int) -> None:
    s = state(Fraction(9, 10), (3_000,), torch.int32, "contiguous", torch.float32, 0)
    x, v, i, y, out = (t.to(DEVICE) for t in s)
    y[2_345] = poison
    watch = torch.zeros(2, device=DEVICE)
    cuda.advance_(x, v, i, y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, form, 3, out, watch)
    assert (watch[0] <= 2.0**30) == (form == 2 and poison == -float("inf"))  # a relu makes 0 of that


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1_500), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("carried_in", DTYPES)
def test_gradients_are_carried_with_the_same_bits(form, shape, dtype, carried_in) -> None:
    for ours, theirs in carried(cuda.carry, shape, dtype, carried_in, form, DEVICE):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 31, 1_023, 5_000])
def test_the_hash_is_the_one_defined(dtype: torch.dtype, size: int) -> None:
    t = torch.randint(0, 200, (size + 1,)).to(dtype).to(DEVICE)[size % 2 :]
    for seed, sign in ((0, 1), (1, -1), (77, 1)):
        found = torch.full((), 5, dtype=torch.int64, device=DEVICE)
        assert cuda.digest(t, found, seed, sign)
        assert found == 5 + sign * verify.digest_ref(verify.words(t), seed)


@pytest.mark.parametrize("size", [8 * 1024, 8 * 1024 + 1, 20_000, 40_960, 41_000])
def test_the_hash_of_many_words_is_the_one_defined(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MANY", 8 * 1024)  # by several blocks a program
    test_the_hash_is_the_one_defined(torch.int32, size)


@pytest.mark.parametrize("integers", [torch.int32, torch.int16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded"])
def test_a_start_is_encoded_with_the_same_bits(integers: torch.dtype, dtype: torch.dtype, layout: str) -> None:
    x = torch.randn(2, 3, 30, 20).to(dtype).to(DEVICE)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "expanded":
        x = x[:1].expand(2, -1, -1, -1)
    fixed = FixedPoint(20 if integers == torch.int32 else 9, integers)
    q, out = torch.empty_like(x, dtype=integers), torch.empty_like(x)
    watch = torch.zeros(1, 4, device=DEVICE)[0, :2]
    assert cuda.encode(x, 2.0**fixed.bits, 2.0**-fixed.bits, q, out, watch, 1)
    assert torch.equal(q, fixed.encode(x))
    assert torch.equal(out, fixed.decode(q, dtype))
    assert watch.tolist() == [0.0, q.abs().max()]


@pytest.mark.parametrize("integers", [torch.int32, torch.int16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_integers_are_decoded_with_the_same_bits(integers: torch.dtype, dtype: torch.dtype, layout: str) -> None:
    limit, bits = torch.iinfo(integers).max, 17 if integers == torch.int32 else 9
    q = torch.randint(-limit, limit, (2, 3, 30, 20), dtype=integers).to(DEVICE)
    q[0, 0, 0, :3] = torch.tensor([-limit - 1, limit, 0])
    q = q.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else q
    out = torch.empty_like(q, dtype=dtype)
    assert cuda.decode(q, 2.0**-bits, out)
    assert torch.equal(out, FixedPoint(bits, integers).decode(q, dtype))
    assert not cuda.decode(q.long(), 2.0**-bits, out)
    assert not cuda.decode(q, 2.0**-bits, out.transpose(2, 3))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e12])
def test_the_watch_sees_a_start_that_is_not_finite_or_too_large(poison: float) -> None:
    x = torch.randn(3_000).to(DEVICE)
    x[2_345] = poison
    watch = torch.zeros(2, device=DEVICE)
    assert cuda.encode(x, 2.0**20, 2.0**-20, torch.empty_like(x, dtype=torch.int32), None, watch, 1)
    assert not watch[1] <= 2.0**30


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 3_001, 1_025])
def test_a_relu_lets_through_what_torch_does(size: int, dtype: torch.dtype) -> None:
    x, v, i, y, out = state(Fraction(9, 10), (size,), torch.int32, "contiguous", dtype, 0, seen=torch.float32)
    x = torch.where(torch.rand(size) < 0.3, 0, x)
    y[::7], y[::11], y[::13], y[::17] = float("nan"), 0.0, float("inf"), -0.0
    leaf = y.clone().requires_grad_()
    with torch.enable_grad():
        leaf.add(0).add_(x * 2.0**-20).relu().sum().backward()
    x, v, i, y, out = (t.to(DEVICE) for t in (x, v, i, y, out))
    mask, watch = bits(x), torch.zeros(2, device=DEVICE)
    cuda.advance_(x, v, i, y, torch.float32, 9, 10, 0.1 * 2.0**20, 2.0**-20, 2, 3, out, watch, mask)
    assert torch.equal(graph.unpacked(mask, x.shape, x.stride()).to(dtype).cpu(), leaf.grad)
    assert not mask.cpu()[-1] >> (size % 8 or 8), "bits beyond the last element"


def test_launched_again_with_addresses(monkeypatch) -> None:
    calls: list[tuple] = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args, stream: calls.append((grid, args, stream))

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((grid, args, options)) or Compiled()

    kernel, memory = Kernel(), torch.zeros(2_000)
    monkeypatch.setattr(cuda, "_compiled", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    a, b = memory[:1_024], memory[1_024:]
    assert (a.data_ptr() | b.data_ptr()) % 16 == 0
    for t in (a, a, memory[1:1_025], a):
        cuda._launch(kernel, (t, b), 2_048, (3, 0.5), True)
    first, again, misaligned, last = calls
    assert first == ((2, 1, 1), (a, b, 2_048, 3, 0.5, True, cuda.BLOCK), {"enable_fp_fusion": False})
    assert again == last == ((2, 1, 1), (a.data_ptr(), b.data_ptr(), 2_048, 3, 0.5, True, cuda.BLOCK), 7)
    assert misaligned[1][0].data_ptr() % 16 == 4  # compiled for any address
    cuda._launch(kernel, (a, b), 2_048, (1, 0.5), True)
    assert isinstance(calls[-1][1][0], torch.Tensor)  # a 1 is compiled in
