"""The integer steps, as operators that faster bodies can replace.

    advance_   v ← γ·v + gain·f   x ← x + ⌊v⌉     out = decode(x), the next block's input
    pull_      x ← x − ⌊v⌉                        out = decode(x), the same block's input again
    retreat_   v ← (v − gain·f) / γ               with an `out`: then `pull_` of the step before, in the same pass over memory

v has `guard` more binary digits than x, and ⌊v⌉ is v rounded to x's. Rounding is a function of v alone, so it is undone as
exactly as it is done; without the guard digits the noise of each γ·v would be summed 1/(1−γ) times over into x.

`pull_` then `retreat_` undo `advance_`; the block runs between them, because its input is x before the step. f is the
block's output y ("branch"), y − x̃ ("block") or relu(x̃ + y) − x̃ ("relu"; the sum is rounded to y's dtype), x̃ being x as the
block saw it: decoded from the integers to its dtype, so a block that overwrites its input does no harm.

The bodies here are the definition, in plain torch. `retrograde.kernels` registers faster ones, with the same bits, which `bodies`
finds without the dispatcher: that takes longer than a small step. `watch`, zero before, receives the largest |v| and |x| after the
step (NaN if f was not finite), as floats, without a host sync; `mask`, where the relu passed it on: element 8b + j is bit j of byte b.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .multiply import multiply

library = torch.library.Library("retrograde", "DEF")
_IN = "Tensor(a!) x, Tensor(b!) v, Tensor(c!)? i, Tensor y, ScalarType seen, int n, int d, float scale, float unit, int form, int guard"
library.define(f"advance_({_IN}, Tensor(d!) out, Tensor(e!) watch, Tensor(f!)? mask=None) -> ()")
library.define("pull_(Tensor(a!) x, Tensor v, float unit, int guard, Tensor(b!) out) -> ()")
library.define(f"retreat_({_IN}, Tensor(d!)? out) -> ()")

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


def increment(
    x: Tensor, y: Tensor, seen: torch.dtype, scale: float, unit: float, form: int, mask: Tensor | None = None
) -> Tensor:
    """gain·f in units of v, rounded but still a float, so that NaN and values out of range can be seen.

    x is the integer state before the step; `scale` is gain·2^(bits + guard) and `unit` is 2^−bits.
    """
    x0 = _decoded(x, unit)
    f, x0 = y.to(x0.dtype), x0.to(seen).to(x0.dtype)
    if form == 2:
        f = torch.relu((x0 + f).to(y.dtype).to(f.dtype))
        if mask is not None:
            bits = torch.empty_like(x, dtype=torch.uint8).copy_(~(f <= 0)).as_strided((x.numel(),), (1,))
            eights = torch.nn.functional.pad(bits, (0, -x.numel() % 8)).view(-1, 8)
            mask.copy_((eights << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(1))
    return torch.round((f - x0 if form else f) * scale)


def rounded(v: Tensor, guard: int) -> Tensor:
    """v without its guard digits."""
    return (v + (1 << (guard - 1))) >> guard if guard else v


def _decoded(x: Tensor, unit: float) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.int64 else torch.float32) * unit


def _multiply_(v: Tensor, i: Tensor | None, n: int, d: int) -> None:
    if n == 0:
        v.zero_()
    elif n != d:
        assert i is not None
        for held, now in zip((v, i), multiply(v, i, n, d), strict=True):
            held.copy_(now)


def advance_(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor, watch: Tensor, mask: Tensor | None = None,
) -> None:  # fmt: skip
    step = increment(x, y, seen, scale, unit, form, mask)
    _multiply_(v, i, n, d)
    exact = v.double() + step.double()
    v.add_(step.to(v.dtype))
    x.add_(rounded(v, guard))
    out.copy_(_decoded(x, unit))
    if x.numel():
        watch.copy_(torch.stack([exact.abs().amax(), x.double().abs().amax()]))


def pull_(x: Tensor, v: Tensor, unit: float, guard: int, out: Tensor) -> None:
    x.sub_(rounded(v, guard))
    out.copy_(_decoded(x, unit))


def retreat_(
    x: Tensor, v: Tensor, i: Tensor | None, y: Tensor, seen: torch.dtype,
    n: int, d: int, scale: float, unit: float, form: int, guard: int, out: Tensor | None,
) -> None:  # fmt: skip
    v.sub_(increment(x, y, seen, scale, unit, form).to(v.dtype))
    _multiply_(v, i, d, n)
    if out is not None:
        pull_(x, v, unit, guard, out)


for _body in (advance_, pull_, retreat_):
    library.impl(_body.__name__, _body, "CompositeExplicitAutograd")
