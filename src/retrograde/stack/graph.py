"""Autograd nodes: tokens carry gradients, integers carry values.

Each node moves the integer state and hands out zero-storage tokens in its place, so that autograd sees the recurrence
without holding any of it. A node's float output is the next block's input.

    Enter   (x₀)             → token x, float x₀
    Launch  (token x, y)     → token x, token v, float x₀      v₀ = f
    Step    (tokens, y)      → token x, token v, float x_{k+1}
    Leave   (token v)        → float v

The step is linear, so its gradient needs no values: with s = gx + gv,

    gy = gain·s      gv ← γ·s      gx ← gx            (and gx ← gx − gy where f = y − x)

Where f = relu(x + y) − x, the node keeps where the relu let its input through, one bit an element: there gy goes to the block and
gx stays, elsewhere the block gets 0 and gx ← gx − gy.

gv is a multiple of gy, which the block is given anyway: so what comes for token v *is* gy of the step that took it, and its
gradient is (γ/gain)·gy (`Recurrence.carried`). At the last step of a pass gv is 0, and then gx is a multiple of gy too (after a
relu one of two, as its bits say, which go with gy then): it is left out, and the step before makes it. What a block's backward
pass holds besides its own is one array, none in the last block; after a relu one more, since gy is not what the block is given.

So the float x of a layer is given only what comes through the block that it goes into; the rest of its gradient goes by the token
(`rejoin`: where somebody looks, all of it goes through the float).

Gradients for token x arrive in arrays that these nodes made themselves one step earlier, so they are updated in place,
except where a graph of the backward pass itself is asked for (`create_graph`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..core.errors import ReplayError
from ..core.ops import values
from .momentum import Momentum
from .rejoin import apart, traced

Factors = tuple[float, float, float, float, int]
"""c, e, e1, gain and the form: gv = c·h and, where gx is left out, gx = e·h, or e1·h where a relu let x through; gy = gain·s."""


def carry(
    p: Tensor | None, h: Tensor | None, d: Tensor, factors: Factors,
    out: Tensor | None, gy: Tensor, cast: Tensor, mask: Tensor | None = None, after: Tensor | None = None,
) -> None:  # fmt: skip
    """The gradient of a step: gx = p + d, s = gx + c·h, gy ← gain·s, out ← gx (or gx − gy, see above), cast ← what the block gets.

    Args:
        p: gx from the step after; None: e·h, or e1·h where `after` says so.
        h: gy of the step after; None: 0.
        d: the gradient of the step's float output.
        out: where gx goes, may be p; None: nowhere.
        gy: in the dtype that gradients are carried in; laid out as the state.
        cast: in the dtype of the block's output; may be gy where there is no mask.
        mask: what the relu let through, as `core.ops` packs it.
        after: the mask of the step after, if it had one and left gx out.
    """
    passed, later = (None if m is None else unpacked(m, gy.shape, gy.stride()) for m in (mask, after))
    gx, g = _carried(p, h, d, factors, passed, later)
    gy.copy_(g)
    if cast is not gy:
        cast.copy_(gy if passed is None else torch.where(passed, gy, 0))
    if out is not None:
        out.copy_(gx)


def unpacked(mask: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """The bits of a mask, for a state of this shape and layout."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask[:, None] >> places) & 1).bool().view(-1).as_strided(shape, strides)


def applied(node: type[Function]) -> Any:
    """`node.apply`; where no function transform is active, without the look-up of one at every call."""
    return node.apply if torch._C._are_functorch_transforms_active() else super(Function, node).apply  # type: ignore[misc]


def _sum(p: Tensor | None, d: Tensor | None, work: torch.dtype) -> Tensor | None:
    """p + d, into p's memory where no graph is being made of it; d is never written to."""
    if p is None or d is None:
        return p if d is None else d.to(work, copy=True)
    return p + d if traced(p, d) else p.add_(d)


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, state: Momentum) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.work = x0.dtype, state.gradient
        return state.token(), state.first()

    @staticmethod
    def backward(ctx: Any, p: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, None]:
        gx = _sum(*apart(p, d), ctx.work)
        return (None if gx is None else gx.to(ctx.dtype)), None


class Launch(Function):
    @staticmethod
    def forward(ctx: Any, xt: Tensor, y: Tensor, state: Momentum, form: str) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.form, ctx.work = y.dtype, form, state.gradient
        ctx.unit = state.recurrence.carried[0][0]
        ctx.passed = state.launch(y, form)
        return state.token(), state.token(), state.read()

    @staticmethod
    def backward(ctx: Any, p: Tensor | None, h: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:
        gx = _sum(*apart(p, d), ctx.work)
        if h is None:
            return gx, None, None, None
        gv = h * ctx.unit
        if ctx.form == "branch":
            return gx, gv.to(ctx.dtype), None, None
        if ctx.form == "block":
            return _sum(gx, -gv, ctx.work), gv.to(ctx.dtype), None, None
        passed = _kept(ctx, "passed")
        return _sum(gx, -torch.where(passed, 0, gv), ctx.work), torch.where(passed, gv, 0).to(ctx.dtype), None, None


class Step(Function):
    @staticmethod
    def forward(ctx: Any, xt: Tensor, vt: Tensor, y: Tensor, state: Momentum, k: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        recurrence = state.recurrence
        ctx.factors = (*recurrence.carried[k + 1], recurrence.factors[k][3], state.form(k))
        ctx.dtypes, ctx.ops, ctx.thread = (y.dtype, state.gradient), state.ops, state.thread
        ctx.first, ctx.shown = k == 0, recurrence.carried[k][1:] if k in state.entered else None
        ctx.mask = mask = state.mask(k)
        ctx.strides = state.x.stride() if recurrence.form == "relu" else None
        ctx.last = k + 1 == len(recurrence.gammas)
        return state.token(), state.token(), state.advance(k, y, mask)

    @staticmethod
    def backward(ctx: Any, p: Tensor | None, h: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:
        if p is None and h is None and d is None:
            return None, None, None, None, None
        if h is not None and h.__dict__.get("_version_carried", h._version) != h._version:
            raise ReplayError(
                "a gradient was changed in place inside a block's backward pass (by a hook, or by a Function's backward). "
                "Return a changed copy instead."
            )
        dtype, work = ctx.dtypes
        p, d = apart(p, d)
        factors: Factors = ctx.factors
        relu = factors[-1] == 2
        mask = _kept(ctx, "mask") if relu else None
        if d is None:
            given = h if h is not None else p
            assert given is not None
            d = given.new_zeros(()).expand(given.shape)
        after = None
        if p is None and h is not None and ctx.strides is not None and not ctx.last:
            after = h.__dict__["_mask_carried"]  # no default: a gradient made without it would be wrong
        left_out = p is None and h is None and ctx.needs_input_grad[1] and not ctx.first  # it can be made from gy
        if traced(p, h, d):
            passed, later = (None if m is None else unpacked(m, d.shape, ctx.strides) for m in (mask, after))
            out, gy = _carried(p, h, d, factors, passed, later)
            gv, given = gy.to(work), gy if passed is None else torch.where(passed, gy, 0)
            gx = _left_out(ctx, gv, mask) if left_out else out.to(work)
            return gx, gv if ctx.needs_input_grad[1] else None, given.to(dtype), None, None
        d = values(d)
        bits = mask is not None or after is not None  # in the order of the state
        gy = d.new_empty_strided(d.shape, ctx.strides, dtype=work) if bits else torch.empty_like(d, dtype=work)
        into = p if p is not None and p.stride() == gy.stride() else None if left_out else torch.empty_like(gy)
        cast = gy if dtype == work and not relu else torch.empty_like(gy, dtype=dtype)
        faster = getattr(ctx.ops, "carry", None)
        if faster is None or not faster(p, h, d, factors, into, gy, cast, mask, after):
            carry(p, h, d, factors, into, gy, cast, mask, after)
        if not ctx.needs_input_grad[1]:
            return into, None, cast, None, None
        gy.__dict__["_version_carried"] = gy._version
        return _left_out(ctx, gy, mask) if left_out else into, gy, cast, None, None


def _left_out(ctx: Any, gy: Tensor, mask: Tensor | None) -> Tensor | None:
    """What a step gives for gx where the step before makes it from gy: nothing; or, where somebody looks, what is to be seen."""
    gy.__dict__["_mask_carried"] = mask
    if ctx.shown is None:
        return None
    e, e1 = ctx.shown
    gx = _of(gy, e, e1, None if mask is None else unpacked(mask, gy.shape, ctx.strides))
    gx.__dict__["_left_out"] = True
    return gx


def _of(h: Tensor, e: float, e1: float, passed: Tensor | None) -> Tensor:
    """gx, of gy of a step that left it out."""
    return h * e if passed is None else torch.where(passed, h * e1, h * e)


def _carried(
    p: Tensor | None, h: Tensor | None, d: Tensor, factors: Factors, passed: Tensor | None, later: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`carry`, out of place: gx and gy, in float32 at least."""
    c, e, e1, gain, form = factors
    work = torch.float64 if torch.float64 in (t.dtype for t in (p, h, d) if t is not None) else torch.float32
    d, h = d.to(work), None if h is None else h.to(work)
    if p is None and h is not None:
        p = _of(h, e, e1, later)
    gx = d if p is None else p.to(work) + d
    gy = (gx if h is None else gx + h * c) * gain
    if passed is not None:
        return torch.where(passed, gx, gx - gy), gy
    return gx - gy if form else gx, gy


def _kept(ctx: Any, name: str) -> Tensor:
    """What the node keeps; for the last time, unless the graph is to be run through again: nodes outlive the backward pass."""
    kept: Tensor | None = getattr(ctx, name)
    if kept is None:
        raise RuntimeError(
            "The backward pass of this network has run. To run it twice, pass retain_graph=True to the first."
        )
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        setattr(ctx, name, None)
    return kept


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, vt: Tensor, state: Momentum) -> Tensor:
        ctx.work = state.gradient
        return state.read_velocity()

    @staticmethod
    def backward(ctx: Any, gv: Tensor) -> tuple[Tensor, None]:
        return gv.to(ctx.work), None
