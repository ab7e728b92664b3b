"""The integer steps, as operators that faster bodies can replace.

    advance_   v ← γ·v + gain·f   x ← x + ⌊v⌉     out = decode(x), the next block's input
    pull_      x ← x − ⌊v⌉                        out = decode(x), the same block's input again
    retreat_   v ← (v − gain·f) / γ               with an `out`: then `pull_` of the step before, in the same pass over memory

v has `guard` more binary digits than x, and ⌊v⌉ is v rounded to x's. Rounding is a function of v alone, so it is undone as
exactly as it is done; without the guard digits the noise of each γ·v would be summed 1/(1−γ) times over into x.

`pull_` then `retreat_` undo `advance_`; the block runs between them, because its input is x before the step. f is the
block's output y, or y − x̃ where the block adds its own skip connection, x̃ being x as the block saw it (decoded to its
dtype: from the integers, so a block that overwrites its input does no harm).

The bodies here are the plain-torch definition, for any device. `retrograde.kernels` registers faster ones for particular
devices, with the same bits; `bodies` finds them without the dispatcher, which takes longer than a small step.
`watch`, zero before, receives the largest |v| and |x| after the step (NaN if f was not finite), as floats, without a host sync.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .multiply import divide, multiply

library = torch.library.Library("retrograde", "DEF")
_STATE = "Tensor(a!) x, Tensor(b!) v, Tensor(c!)? i"
_STEP = f"{_STATE}, Tensor y, ScalarType seen, int n, int d, float scale, float unit, bool residual, int guard"
library.define(f"advance_({_STEP}, Tensor(d!) out, Tensor(e!) watch) -> ()")
library.define("pull_(Tensor(a!) x, Tensor v, float unit, int guard, Tensor(b!) out) -> ()")
library.define(f"retreat_({_STEP}, Tensor(d!)? out) -> ()")

ops = torch.ops.retrograde
registered: dict[str | type, Any] = {}  # by kind of device, or by kind of tensor


def register(device: str, key: str, *steps: Callable[..., Any], **others: Callable[..., Any]) -> None:
    """Make these the bodies of the operators of their names, on one kind of device; the others are for `bodies` alone."""
    for step in steps:
        library.impl(step.__name__, step, key)
    registered[device] = SimpleNamespace(**others, **{step.__name__: step for step in steps})


def bodies(t: Tensor) -> Any:
    """What runs on tensors like t: the bodies registered for its device; where it is no plain tensor, the operators."""
    return registered.get(t.device.type if type(t) in (Tensor, Parameter) else type(t), ops)


def values(t: Tensor) -> Tensor:
    """t; where it is a subclass that may hold its values elsewhere (a collective under way), a copy that has an address."""
    return t if type(t) in (Tensor, Parameter) or type(t) in registered else t.clone()


def increment(x: Tensor, y: Tensor, seen: torch.dtype, scale: float, unit: float, residual: bool) -> Tensor:
    """gain·f in units of v, rounded but still a float, so that NaN and values out of range can be seen.

    x is the integer state before the step; `scale` is gain·2^(bits + guard) and `unit` is 2^−bits.
    """
    work = torch.float64 if x.dtype == torch.int64 else torch.float32
    f = y.to(work)
    if residual:
        f = f - (x.to(work) * unit).to(seen).to(work)
    return torch.round(f * scale)


def rounded(v: Tensor, guard: int) -> Tensor:
    """v without its guard digits."""
    return (v + (1 << (guard - 1))) >> guard if guard else v


def advance_(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, residual: bool, guard: int, out: Tensor, watch: Tensor,
) -> None:  # fmt: skip
    step = increment(x, y, seen, scale, unit, residual)
    if n == 0:
        v.zero_()
    elif n != d:
        assert i is not None
        scaled, buffer = multiply(v, i, n, d)
        v.copy_(scaled)
        i.copy_(buffer)
    exact = v.double() + step.double()
    v.add_(step.to(v.dtype))
    x.add_(rounded(v, guard))
    out.copy_(x.to(step.dtype) * unit)
    if x.numel():
        watch.copy_(torch.stack([exact.abs().amax(), x.double().abs().amax()]))


def pull_(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    x.sub_(rounded(v, guard))
    work = torch.float64 if x.dtype == torch.int64 else torch.float32
    out.copy_(x.to(work) * unit)


def retreat_(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, residual: bool, guard: int, out: Tensor | None,
) -> None:  # fmt: skip
    v.sub_(increment(x, y, seen, scale, unit, residual).to(v.dtype))
    if n != d:
        assert i is not None
        original, buffer = divide(v, i, n, d)
        v.copy_(original)
        i.copy_(buffer)
    if out is not None:
        pull_(x, v, unit, guard, out)


for _body in (advance_, pull_, retreat_):
    library.impl(_body.__name__, _body, "CompositeExplicitAutograd")
