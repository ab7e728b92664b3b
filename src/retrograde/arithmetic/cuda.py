"""The kernels on a CUDA device, in Triton: each step one pass over memory, in 32-bit arithmetic.

Quotients by n and d are products with precomputed reciprocals (Granlund and Montgomery, 1994): for 0 ≤ a < 2^31,

    a div b = mulhi(a, M) >> (l − 1)        l = bits of b − 1,   M = 2^(31+l) div b + 1

exact, and no recompilation when γ changes. A negative v is shifted up by a multiple of d first. Products and sums are not
contracted into fused ones, so the bits are those of the plain-torch bodies. Denominators from 2^15 on take 64-bit products.
1/2^k and 2^k are shifts.
Under TRITON_INTERPRET=1 the same kernels run on CPU tensors, which is how they are tested without a GPU.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .multiply import shift
from .ratio import NARROW
from .reference import Kernels, words

BLOCK = 1024
_MANY = 2**22
"""Words from which on a program hashes several blocks of them: there are enough to keep a device busy."""
KEEP, ZERO, NARROW_RATIO, WIDE_RATIO, PUSH, POP = range(6)


def reciprocal(b: int) -> tuple[int, int]:
    """(M, shift) with a div b = mulhi(a, M) >> shift for 0 ≤ a < 2^31; b ≥ 2.

    >>> M, shift = reciprocal(10)
    >>> all((a * M >> 32) >> shift == a // 10 for a in (0, 9, 10, 99, 2**31 - 1))
    True
    """
    bits = (b - 1).bit_length()
    return (1 << (31 + bits)) // b + 1, bits - 1


@triton.jit
def _quotient(a, m, shift):
    """a div b for 0 ≤ a < 2^31, from the reciprocal of b (b = 1: shift is −1)."""
    high = tl.umulhi(a.to(tl.uint32), m.to(tl.uint32)) >> tl.maximum(shift, 0).to(tl.uint32)
    return tl.where(shift < 0, a, high.to(tl.int32))


@triton.jit
def _round(a):
    """To the nearest integer, ties to even. From 2^23 on a float32 is one already."""
    shifted = tl.where(a >= 0, (a + 8388608.0) - 8388608.0, (a - 8388608.0) + 8388608.0)
    return tl.where(tl.abs(a) < 8388608.0, shifted, a)


@triton.jit
def _multiply(v, i, n, d, m_n, s_n, m_d, s_d, lift, KIND: tl.constexpr):
    """`multiply.multiply` of v and the buffer i by n/d; `push` and `pop` of d bits."""
    if KIND == 2:
        rest = _quotient(i, m_n, s_n)
        u = i - rest * n
        q = _quotient(v + lift * d, m_d, s_d) - lift
        t = (v - q * d) * n + u
        carry = _quotient(t, m_d, s_d)
        v = q * n + carry
        i = rest * d + (t - carry * d)
    elif KIND == 3:
        rest = i // n
        u = v.to(tl.int64) * n + (i - rest * n)
        q = u // d
        q = tl.where(u - q * d < 0, q - 1, q)
        i = (rest.to(tl.int64) * d + (u - q * d)).to(tl.int32)
        v = q.to(tl.int32)
    elif KIND == 4:
        i = (i << d) | (v & ((1 << d) - 1))
        v = v >> d
    elif KIND == 5:
        v = (v << d) | (i & ((1 << d) - 1))
        i = i >> d
    return v, i


@triton.jit
def _scaled(
    v, i_ptr, before_ptr, at, inside, n, d, m_n, s_n, m_d, s_d, lift, over, KIND: tl.constexpr, OVER: tl.constexpr
):
    """v·n/d, and what that moves in the buffer. OVER: `over` of the bits of a shift are in the buffer before."""
    if KIND == 1:
        return v * 0
    if KIND >= 2:
        if OVER and KIND == 4:
            before = tl.load(before_ptr + at, inside, other=0).to(tl.int32)
            v, before = _multiply(v, before, n, over, m_n, s_n, m_d, s_d, lift, KIND)
            tl.store(before_ptr + at, before, inside)
        i = tl.load(i_ptr + at, inside, other=0).to(tl.int32)
        v, i = _multiply(v, i, n, d - over, m_n, s_n, m_d, s_d, lift, KIND)
        tl.store(i_ptr + at, i, inside)
        if OVER and KIND == 5:
            before = tl.load(before_ptr + at, inside, other=0).to(tl.int32)
            v, before = _multiply(v, before, n, over, m_n, s_n, m_d, s_d, lift, KIND)
            tl.store(before_ptr + at, before, inside)
    return v


@triton.jit
def _output(x, y, unit, FORM: tl.constexpr, SEEN: tl.constexpr):
    """f + x̃ and x̃, or f and 0."""
    f, x0 = y.to(tl.float32), 0.0
    if FORM != 0:
        x0 = (x.to(tl.float32) * unit).to(SEEN).to(tl.float32)
    if FORM == 2:
        s = (x0 + f).to(y.dtype).to(tl.float32)
        f = tl.where(s <= 0, 0.0, s)
    return f, x0


@triton.jit
def _step(f, x0, scale, FORM: tl.constexpr):
    return _round((f - x0) * scale) if FORM != 0 else _round(f * scale)


@triton.jit
def _store_bits(mask_ptr, passed, size, BLOCK: tl.constexpr):
    """Element 8b + j is bit j of byte b."""
    eights = tl.reshape(passed.to(tl.int32), (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    at = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(mask_ptr + at, tl.sum(eights, 1).to(tl.uint8), at * 8 < size)


@triton.jit
def _rounded(v, guard):
    return tl.where(guard > 0, (v + ((1 << guard) >> 1)) >> guard, v)


@triton.jit
def _held(a, ptr):
    """a as it is held: what leaves the range wraps, and comes back by the opposite step."""
    return a.to(ptr.dtype.element_ty).to(tl.int32)


@triton.jit
def _raise(float_ptr, most):
    """Raise a non-negative float, taken as its bits, to `most`."""
    at = float_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    # most pieces are below what is there already: a look at it is cheaper than an atomic operation
    tl.atomic_max(at, most, mask=most > tl.load(at), sem="relaxed")


@triton.jit
def _advance(
    x_ptr, v_ptr, i_ptr, y_ptr, out_ptr, watch_ptr, mask_ptr, before_ptr,
    size, n, d, m_n, s_n, m_d, s_d, lift, over, scale, unit, guard,
    KIND: tl.constexpr, OVER: tl.constexpr, FORM: tl.constexpr, SEEN: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, inside, other=0).to(tl.int32)
    v = tl.load(v_ptr + at, inside, other=0).to(tl.int32)
    f, x0 = _output(x, tl.load(y_ptr + at, inside, other=0.0), unit, FORM, SEEN)
    step = _step(f, x0, scale, FORM)
    if MASK:
        _store_bits(mask_ptr, inside & ~(f <= 0), size, BLOCK)
    v = _scaled(v, i_ptr, before_ptr, at, inside, n, d, m_n, s_n, m_d, s_d, lift, over, KIND, OVER)
    good = tl.abs(step) <= 1073741824.0
    v = v + tl.where(good, step, 0.0).to(tl.int32)
    # magnitudes as the bits of non-negative floats, which order as integers do, NaN above all
    peak_v = tl.where(good, tl.abs(v.to(tl.float32)), tl.abs(step)).to(tl.int32, bitcast=True)
    v = _held(v, v_ptr)
    x = _held(x + _rounded(v, guard), x_ptr)
    tl.store(v_ptr + at, v, inside)
    tl.store(x_ptr + at, x, inside)
    tl.store(out_ptr + at, x.to(tl.float32) * unit, inside)
    peak_x = tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)
    most_v = tl.max(tl.where(inside, peak_v, 0), 0)
    most_x = tl.max(tl.where(inside, peak_x, 0), 0)
    _raise(watch_ptr, most_v)
    _raise(watch_ptr + 1, most_x)


@triton.jit
def _encode(x_ptr, q_ptr, watch_ptr, size, scale, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    scaled = _round(tl.load(x_ptr + at, inside, other=0.0).to(tl.float32) * scale)
    q = _held(tl.where(tl.abs(scaled) <= 1073741824.0, scaled, 0.0).to(tl.int32), q_ptr)
    tl.store(q_ptr + at, q, inside)
    most = tl.max(tl.abs(scaled).to(tl.int32, bitcast=True), 0)
    _raise(watch_ptr + COLUMN, most)


@triton.jit
def _decode(q_ptr, out_ptr, size, unit, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out_ptr + at, tl.load(q_ptr + at, inside, other=0).to(tl.int32).to(tl.float32) * unit, inside)


@triton.jit
def _pull(x_ptr, v_ptr, out_ptr, size, unit, guard, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    v = tl.load(v_ptr + at, inside, other=0).to(tl.int32)
    x = _held(tl.load(x_ptr + at, inside, other=0).to(tl.int32) - _rounded(v, guard), x_ptr)
    tl.store(x_ptr + at, x, inside)
    tl.store(out_ptr + at, x.to(tl.float32) * unit, inside)


@triton.jit
def _retreat(
    x_ptr, v_ptr, i_ptr, y_ptr, out_ptr, before_ptr,
    size, n, d, m_n, s_n, m_d, s_d, lift, over, scale, unit, guard,
    KIND: tl.constexpr, OVER: tl.constexpr, FORM: tl.constexpr, SEEN: tl.constexpr, PULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x = tl.load(x_ptr + at, inside, other=0).to(tl.int32) if FORM != 0 or PULL else 0
    f, x0 = _output(x, tl.load(y_ptr + at, inside, other=0.0), unit, FORM, SEEN)
    step = _step(f, x0, scale, FORM)
    good = tl.abs(step) <= 1073741824.0
    v = _held(tl.load(v_ptr + at, inside, other=0).to(tl.int32) - tl.where(good, step, 0.0).to(tl.int32), v_ptr)
    v = _scaled(v, i_ptr, before_ptr, at, inside, n, d, m_n, s_n, m_d, s_d, lift, over, KIND, OVER)
    tl.store(v_ptr + at, v, inside)
    if PULL:
        x = _held(x - _rounded(v, guard), x_ptr)
        tl.store(x_ptr + at, x, inside)
        tl.store(out_ptr + at, x.to(tl.float32) * unit, inside)


@triton.jit
def _load_bits(mask_ptr, at, inside):
    return ((tl.load(mask_ptr + at // 8, inside, other=0).to(tl.int32) >> (at % 8).to(tl.int32)) & 1) != 0


@triton.jit
def _carry(
    p_ptr, h_ptr, d_ptr, out_ptr, gy_ptr, cast_ptr, mask_ptr, after_ptr, size, c, e, e1, gain,
    P: tl.constexpr, H: tl.constexpr, OUT: tl.constexpr, CAST: tl.constexpr, AFTER: tl.constexpr, FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gx = tl.load(d_ptr + at, inside, other=0.0).to(tl.float32)
    if H:
        h = tl.load(h_ptr + at, inside, other=0.0).to(tl.float32)
    if P:
        gx = tl.load(p_ptr + at, inside, other=0.0).to(tl.float32) + gx
    elif AFTER:
        gx = tl.where(_load_bits(after_ptr, at, inside), h * e1, h * e) + gx
    elif H:
        gx = h * e + gx
    s = gx
    if H:
        s = gx + h * c
    gy = s * gain
    given = gy.to(gy_ptr.dtype.element_ty)
    tl.store(gy_ptr + at, given, inside)
    if FORM == 2:
        passed = _load_bits(mask_ptr, at, inside)
        given = tl.where(passed, given.to(tl.float32), 0.0)
        gy = tl.where(passed, 0.0, gy)
    if CAST:
        tl.store(cast_ptr + at, given, inside)
    if OUT:
        tl.store(out_ptr + at, gx - gy if FORM != 0 else gx, inside)


@triton.jit(do_not_specialize=["seed", "sign"])
def _digest(w_ptr, into_ptr, size, seed, sign, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TIMES)
    left_here = tl.minimum(size - first, BLOCK * TIMES).to(tl.int32)
    pairs_here = (left_here + 15) // 16 * 8
    pair = tl.arange(0, BLOCK // 2)
    total = tl.zeros((BLOCK // 2,), tl.int64)
    for _ in tl.static_range(TIMES):
        at = pair // 8 * 16 + pair % 8
        left = tl.load(w_ptr + first + at, at < left_here, other=0).to(tl.uint32, bitcast=True)
        right = tl.load(w_ptr + first + at + 8, at + 8 < left_here, other=0).to(tl.uint32, bitcast=True)
        k = (pair.to(tl.uint32) + (first // 2).to(tl.uint32)) * 0x9E3779B1 + seed.to(tl.uint32) + 0xC2B2AE3D
        k = (k ^ (k >> 15)) * 0x85EBCA77
        k = k ^ (k >> 13)
        product = (left + k).to(tl.uint64) * (right + k * 0xC2B2AE3D).to(tl.uint64)
        total += tl.where(pair < pairs_here, product.to(tl.int64, bitcast=True), 0)
        pair += BLOCK // 2
    tl.atomic_add(into_ptr, tl.sum(total, 0) * sign, sem="relaxed")


_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache(maxsize=1024)
def _ratio(n: int, d: int) -> tuple[int, ...]:
    """n, d, their reciprocals, and the multiple of d that makes any v in range positive. For a shift d is its bits."""
    if shift(n, d):
        return (0, abs(shift(n, d)), 0, 0, 0, 0, 0)
    lift = -(-(2**30) // d) if d < NARROW else 0  # no more: v + lift·d must stay where the quotient is exact
    return (n, d, *(reciprocal(n) if n > 1 else (0, -1)), *(reciprocal(d) if d > 1 else (0, -1)), lift)


def _kind(n: int, d: int) -> int:
    if n == d:
        return KEEP
    if shift(n, d):
        return PUSH if n < d else POP
    return ZERO if n == 0 else NARROW_RATIO if max(n, d) < NARROW else WIDE_RATIO


_compiled: dict[Any, Any] = {}


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], size: int, numbers: tuple[float, ...], *constants: Any, times: int = 1
) -> None:
    """Run a kernel on `size` elements, so many `times` a block of them each; from the second time on without the look-up of Triton's
    own launcher.

    What the compiler may specialise a kernel on is in the key: dtypes, divisibility of the size, whole numbers; alignment is seen
    to. Addresses are given as numbers: of each tensor the launcher would ask for its own, and the driver whether that is one.
    """
    if not size:
        return
    device, pointers = tensors[0].device, [t.data_ptr() for t in tensors]
    key = (  # of the kernel its id: its hash is one of its source, behind a lock
        id(kernel), device, size % 16 == 0, size == 1, size < 2**31, constants,
        *[t.dtype for t in tensors], *[n for n in numbers if type(n) is int],
    )  # fmt: skip
    grid, compiled, aligned = (-(-size // (BLOCK * times)), 1, 1), _compiled.get(key), not reduce(or_, pointers) & 15
    if compiled is not None and aligned:
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        compiled[grid](*pointers, size, *numbers, *constants, BLOCK, stream=stream)
        return
    compiled = kernel[grid](*tensors, size, *numbers, *constants, BLOCK, enable_fp_fusion=False)
    if aligned:
        _compiled[key] = compiled


def encode(x: Tensor, scale: float, q: Tensor, watch: Tensor, column: int) -> None:
    _launch(_encode, (x, q, watch), q.numel(), (scale,), column)


def decode(q: Tensor, unit: float, out: Tensor) -> None:
    _launch(_decode, (q, out), q.numel(), (unit,))


def advance(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None,
    before: Tensor | None, over: int,
) -> None:  # fmt: skip
    i, before = x if i is None else i, x if before is None else before
    tensors = (x, v, i, y, out, watch, x if mask is None else mask, before)
    numbers = (*_ratio(n, d), over, scale, unit, guard)
    constants = (_kind(n, d), over > 0, form, _FLOATS[seen], mask is not None)
    _launch(_advance, tensors, x.numel(), numbers, *constants)


def pull(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    _launch(_pull, (x, v, out), x.numel(), (unit, guard))


def retreat(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None, before: Tensor | None, over: int,
) -> None:  # fmt: skip
    i, before = x if i is None else i, x if before is None else before
    tensors = (x, v, i, y, x if out is None else out, before)
    numbers = (*_ratio(d, n), over, scale, unit, guard)
    constants = (_kind(d, n), over > 0, form, _FLOATS[seen], out is not None)
    _launch(_retreat, tensors, x.numel(), numbers, *constants)


def carry(
    p: Tensor | None, h: Tensor | None, d: Tensor, c: float, e: float, e1: float, gain: float, form: int,
    out: Tensor | None, gy: Tensor, cast: Tensor, mask: Tensor | None, after: Tensor | None,
) -> None:  # fmt: skip
    tensors = tuple(gy if t is None else t for t in (p, h, d, out, gy, cast, mask, after))
    constants = (p is not None, h is not None, out is not None, cast is not gy, after is not None, form)
    _launch(_carry, tensors, gy.numel(), (c, e, e1, gain), *constants)


def digest(t: Tensor, into: Tensor, seed: int, sign: int) -> None:
    all_words = words(t)
    times = 8 if all_words.numel() >= _MANY else 1  # all add to one number, one after another
    _launch(_digest, (all_words, into), all_words.numel(), (seed, sign), times, times=times)


def kernels(integers: torch.dtype) -> Kernels:
    """Those for state in these integers: float64 takes the reference."""
    if integers == torch.int64:
        return reference.KERNELS._replace(digest=digest)
    return Kernels(advance, pull, retreat, encode, decode, carry, digest)
