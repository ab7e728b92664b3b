"""Every kernel in plain torch. These bodies are the definition: the fast ones (`cpu`, `cuda`) give the same bits.

    advance   v ← γ·v + gain·f   x ← x + ⌊v⌉     out = decode(x), the next block's input
    pull      x ← x − ⌊v⌉                        out = decode(x), the same block's input again
    retreat   v ← (v − gain·f) / γ               with an `out`: then `pull` of the step before, in the same pass over memory
    encode    q = round(x·scale)                 decode    out = q·unit
    carry     the gradient of a step
    digest    a hash of memory

`pull` then `retreat` undo `advance`. The block runs between them, because its input is x before the step. v has `guard` more binary
digits than x, and ⌊v⌉ is v rounded to x's digits. Rounding is a function of v alone, so it is undone as exactly as it is done. Without
the guard digits the noise of each γ·v would be summed 1/(1−γ) times over into x.

f is the block's output y (form 0), y − x̃ (form 1) or relu(x̃ + y) − x̃ (form 2; the sum is rounded to y's dtype). x̃ is x as the block
saw it, decoded from the integers to its dtype, so a block that overwrites its input does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .multiply import multiply, pop, push, shift

KEYS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
"""Of `digest`."""
_PIECE, _LOW = 1 << 20, 2**32 - 1


def increment(
    x: Tensor, y: Tensor, seen: torch.dtype, scale: float, unit: float, form: int, mask: Tensor | None = None
) -> Tensor:
    """gain·f in units of v, rounded but still a float, so that NaN and values out of range can be seen.

    Args:
        x: the integers before the step.
        seen: the dtype of the block's input.
        scale: gain·2^(bits + guard).
        unit: 2^−bits.
        form: what the block computes: see above.
        mask: receives one bit an element, set where the relu of form 2 passes its input: element 8b + j is bit j of byte b.
    """
    x0 = decoded(x, unit)
    f, x0 = y.to(x0.dtype), x0.to(seen).to(x0.dtype)
    if form == 2:
        f = torch.relu((x0 + f).to(y.dtype).to(f.dtype))
        if mask is not None:
            mask.copy_(packed(~(f <= 0), x))
    return torch.round((f - x0 if form else f) * scale)


def _in_range(step: Tensor) -> Tensor:
    """The step; 0 where it is NaN or beyond the integers, so that `retreat` takes off what `advance` added even then."""
    limit = 2.0**62 if step.dtype == torch.float64 else 2.0**30
    return torch.where(step.abs() <= limit, step, 0)


def rounded(v: Tensor, guard: int) -> Tensor:
    """v without its guard digits."""
    return (v + (1 << (guard - 1))) >> guard if guard else v


def decoded(x: Tensor, unit: float) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.int64 else torch.float32) * unit


def _multiply_(v: Tensor, i: Tensor | None, n: int, d: int, before: Tensor | None, over: int) -> None:
    k = shift(n, d)
    if n == 0:
        v.zero_()
    elif n != d:
        assert i is not None
        if k:
            (push if k > 0 else pop)(v, i, abs(k), before, over)
            return
        for held, now in zip((v, i), multiply(v, i, n, d), strict=True):
            held.copy_(now)


def advance(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None,
    before: Tensor | None, over: int,
) -> None:  # fmt: skip
    """Take a step. `watch` receives the largest |v| and |x| after it, without a host sync (|v| is NaN if f was not finite).

    Where γ = 1/2^k, `over` of the k bits that γ·v gives up go to the buffer `before`, and the others to i.
    """
    step = increment(x, y, seen, scale, unit, form, mask)
    _multiply_(v, i, n, d, before, over)
    exact = v.double() + step.double()
    v.add_(_in_range(step).to(v.dtype))
    x.add_(rounded(v, guard))
    out.copy_(decoded(x, unit))
    if x.numel():
        watch.copy_(torch.stack([exact.abs().amax(), x.double().abs().amax()]))


def pull(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    x.sub_(rounded(v, guard))
    out.copy_(decoded(x, unit))


def retreat(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None, before: Tensor | None, over: int,
) -> None:  # fmt: skip
    v.sub_(_in_range(increment(x, y, seen, scale, unit, form)).to(v.dtype))
    _multiply_(v, i, d, n, before, over)
    if out is not None:
        pull(x, v, unit, guard, out)


def encode(x: Tensor, scale: float, q: Tensor, watch: Tensor, column: int) -> None:
    """Fill q with x as integers, and raise one column of `watch` to the largest of them."""
    scaled = x.to(torch.float64 if q.dtype == torch.int64 else torch.float32) * scale
    q.copy_(torch.round(_in_range(scaled)).to(q.dtype))
    if x.numel():
        watch[column] = torch.maximum(watch[column], scaled.abs().amax())


def decode(q: Tensor, unit: float, out: Tensor) -> None:
    """Fill out with what the integers q stand for."""
    out.copy_(decoded(q, unit))


def carry(
    p: Tensor | None, h: Tensor | None, d: Tensor, c: float, e: float, e1: float, gain: float, form: int,
    out: Tensor | None, gy: Tensor, cast: Tensor, mask: Tensor | None, after: Tensor | None,
) -> None:  # fmt: skip
    """The gradient of a step: gx = p + d, s = gx + c·h, gy ← gain·s, out ← gx (form 0) or gx − gy, cast ← what the block gets.

    Args:
        p: gx from the step after; None: e·h, or e1·h where `after` is set.
        h: gy of the step after; None: 0.
        d: the gradient of the step's float output.
        out: where gx goes, may be p; None: nowhere.
        gy: in the dtype that gradients are carried in; laid out as the state.
        cast: in the dtype of the block's output; may be gy where there is no mask.
        mask: what the relu passed, as `advance` packs it. There the block gets gy and gx stays; elsewhere it gets 0 and gx ← gx − gy.
        after: the mask of the step after.
    """
    passed = None if mask is None else unpacked(mask, gy.shape, gy.stride())
    passed_after = None if after is None else unpacked(after, gy.shape, gy.stride())
    gx, g = carried(p, h, d, (c, e, e1, gain, form), passed, passed_after)
    gy.copy_(g)
    if cast is not gy:
        cast.copy_(gy if passed is None else torch.where(passed, gy, 0))
    if out is not None:
        out.copy_(gx)


def carried(
    p: Tensor | None, h: Tensor | None, d: Tensor, factors: tuple[float, float, float, float, int],
    passed: Tensor | None, after: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """gx and gy of `carry`, out of place and differentiable, in float32 at least."""
    c, e, e1, gain, form = factors
    work = torch.float64 if torch.float64 in (t.dtype for t in (p, h, d) if t is not None) else torch.float32
    d = d.to(work)
    h = None if h is None else h.to(work)
    if p is None and h is not None:
        p = scaled(h, e, e1, after)
    gx = d if p is None else p.to(work) + d
    gy = (gx if h is None else gx + h * c) * gain
    if passed is not None:
        return torch.where(passed, gx, gx - gy), gy
    return gx - gy if form else gx, gy


def scaled(h: Tensor, e: float, e1: float, passed: Tensor | None) -> Tensor:
    """e·h; e1·h where a relu passed its input."""
    return h * e if passed is None else torch.where(passed, h * e1, h * e)


def packed(passed: Tensor, like: Tensor) -> Tensor:
    """Booleans as bits, in the order of the memory of `like`: element 8b + j is bit j of byte b."""
    bits = torch.empty_like(like, dtype=torch.uint8).copy_(passed).as_strided((like.numel(),), (1,))
    eights = torch.nn.functional.pad(bits, (0, -like.numel() % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=like.device)).sum(1, dtype=torch.uint8)


def unpacked(mask: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """The bits of a mask, for a state of this shape and layout."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask[:, None] >> places) & 1).bool().view(-1).as_strided(shape, strides)


def digest(t: Tensor, into: Tensor, seed: int, sign: int) -> None:
    """Add sign times the hash of a dense tensor to `into`: a 64-bit hash of its bits and their places, by which a replay is recognised.

    The memory is read as 32-bit words w in rows of 16 (the last filled up with zeros), and the left half of each row is multiplied
    with the right one, after adding keys that differ from place to place (NH of Black, Halevi, Krawczyk, Krovetz and Rogaway, 1999):

        Σ (w_j + k_j mod 2^32) · (w_{j+8} + k'_j mod 2^32)   mod 2^64

    One product for two words, a sum in any order. Tensors that differ in one word have the same hash with a chance of 2^−32, in
    several words, of about 2^−64.
    """
    all_words = words(t)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, all_words.numel(), _PIECE):
        piece = all_words[start : start + _PIECE].long() & _LOW
        left, right = torch.nn.functional.pad(piece, (0, -piece.numel() % 16)).view(-1, 2, 8).unbind(1)
        place = torch.arange(start // 2, start // 2 + left.numel(), device=t.device).view_as(left)
        k = (place * KEYS[0] + seed + KEYS[2]) & _LOW
        k = ((k ^ (k >> 15)) * KEYS[1]) & _LOW
        k = k ^ (k >> 13)
        total += (((left + k) & _LOW) * ((right + k * KEYS[2]) & _LOW)).sum()
    into += sign * total


def words(t: Tensor) -> Tensor:
    """The memory of a dense tensor as 32-bit integers."""
    flat = t if t.stride() == (1,) else t.as_strided((t.numel(),), (1,))  # one element may have any stride
    if flat.nbytes % 4 or flat.storage_offset() * flat.itemsize % 4:
        flat = flat.view(torch.uint8)
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


class Kernels(NamedTuple):
    """One implementation."""

    advance: Callable[..., None]
    pull: Callable[..., None]
    retreat: Callable[..., None]
    encode: Callable[..., None]
    decode: Callable[..., None]
    carry: Callable[..., None]
    digest: Callable[..., None]


KERNELS = Kernels(advance, pull, retreat, encode, decode, carry, digest)
