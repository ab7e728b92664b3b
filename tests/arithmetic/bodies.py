"""A state of the integer recurrence and a step on it, by two sets of kernels: those of a module, and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from retrograde.arithmetic import reference
from retrograde.arithmetic.ratio import gain


def state(
    gamma: Fraction,
    shape: tuple[int, ...],
    width: torch.dtype,
    layout: str,
    dtype: torch.dtype,
    seed: int,
    integers: torch.dtype = torch.int32,
    seen: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bound = 2 ** (8 * integers.itemsize - 3)
    x, v = (torch.randint(-bound, bound, shape, generator=generator, dtype=integers) for _ in range(2))
    room = min(torch.iinfo(width).max // gamma.denominator, 2**20)  # leaves a place for the next digit
    i = torch.randint(0, max(room, 1), shape, generator=generator).to(width) if gamma.denominator > 1 else None
    size = 10 ** (seed % 3) if integers == torch.int32 else 2.0**-9  # in units of `step_both`: a step that fits
    y = torch.randn(shape, generator=generator).mul_(size).to(dtype)
    if layout == "channels_last" and len(shape) == 4:
        x, v, y = (t.contiguous(memory_format=torch.channels_last) for t in (x, v, y))
        i = None if i is None else i.contiguous(memory_format=torch.channels_last)
    if layout == "other":
        y = y.transpose(0, -1).contiguous().transpose(0, -1)
    return x, v, i, y, torch.empty_like(x, dtype=seen or dtype)


def step_both(
    ours: Any, state_: tuple[Any, ...], gamma: Fraction, form: int, guard: int, over: int = 0
) -> tuple[list[Any], list[Any]]:
    """The state after a step on and a step back, by our kernels and by the reference.

    `over`: so many bits of a shift go to the buffer i, and the others to a fresh one after it.
    """
    found = []
    for module in (ours, reference):
        x, v, i, y, out = (None if t is None else t.clone() for t in state_)
        y = like(x, y)
        before, i = (i, torch.zeros_like(i)) if over else (None, i)
        watch = torch.zeros(2, device=x.device)
        n, d = gamma.numerator, gamma.denominator
        step = (y, out.dtype, n, d, float(gain(gamma)) * 2.0**20, 2.0**-20, form)
        mask = bits(x) if form == 2 else None
        module.advance(x, v, i, *step, guard, out, watch, mask, before, over)
        trace = [t if t is None else t.clone() for t in (x, v, i, out, watch, mask, before)]
        if n:
            module.pull(x, v, 2.0**-20, guard, out)
            trace.append(out.clone())
            *further, rest = [None if t is None else t.clone() for t in (x, v, i, before)]
            module.retreat(*further, *step, guard, out, rest, over)  # and the first half of the step before
            trace += [*further, rest, out.clone()]
            module.retreat(x, v, i, *step, guard, None, before, over)
            assert not over or not i.any(), "what was pushed is popped"
            trace += [x, v, before if over else i]
        found.append(trace)
    return found[0], found[1]


def like(x: Tensor, t: Tensor) -> Tensor:
    """t as a pass gives it to the kernels: in the layout of the state, not in float64."""
    t = t.float() if t.dtype == torch.float64 else t
    return torch.empty_like(x, dtype=t.dtype).copy_(t) if t.stride() != x.stride() else t


def bits(x: Tensor) -> Tensor:
    """Room for one bit an element."""
    return torch.full((-(-x.numel() // 8),), 77, dtype=torch.uint8, device=x.device)


def carried(
    ours: Any, shape: tuple[int, ...], dtype: torch.dtype, carried_in: torch.dtype, form: int, device: str = "cpu"
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Gradients of a step by our kernel and by the reference: with and without each tensor that may be missing."""
    p, h, d = (torch.randn(shape).to(t).to(device) for t in (carried_in, carried_in, dtype))
    mask, later = (torch.randint(0, 256, bits(p).shape, dtype=torch.uint8).to(device) for _ in range(2))
    mask = mask if form == 2 else None
    for *given, after in ((p, h, None), (None, h, None), (None, h, later), (p, None, None), (None, None, None)):
        for wanted in (True, False):
            found = []
            for body in (ours, reference):
                p_, h_, d_ = (None if t is None else t.clone() for t in (*given, d))
                gy = torch.empty_like(d, dtype=carried_in)
                cast = gy if dtype == carried_in and mask is None else torch.empty_like(gy, dtype=dtype)
                out = None if not wanted else torch.empty_like(gy) if p_ is None else p_
                body.carry(p_, h_, d_, 9.0, 0.7, 1.7, 0.1, form, out, gy, cast, mask, after)
                found.append([gy, cast, *([out] if out is not None else [])])
            yield found[0], found[1]
