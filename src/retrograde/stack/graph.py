"""Autograd nodes: tokens carry gradients, integers carry values.

Each node moves the integer state and hands out zero-storage tokens in its place, so that autograd sees the
recurrence without holding any of it. A node's float output is the next block's input.

    Enter   (x₀)          → token x, float x₀
    Launch  (token x, y)  → token x, token v, float x₀    v₀ = y (or y − x₀)
    Step    (tokens, y)   → tokens, float x_{k+1}
    Leave   (token v)     → float v

The step is linear, so its gradient needs no values: with s = gx + gv,

    gf = gain·s      gv ← γ·s      gx ← gx            (and gx ← gx − gf where f = y − x)

Gradients arrive in arrays that these nodes made themselves one step earlier, so they are updated in place, except
where a graph of the backward pass itself is asked for (`create_graph`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import Function

from ..core.ops import ops
from .momentum import Momentum


def _sum(a: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """a + b, into a's memory where no graph is being made of it; b is never written to."""
    if b is None:
        return a
    if a is None:
        return b.to(dtype, copy=True)
    return a + b if _traced(a, b) else a.add_(b)


def _traced(*gradients: Tensor) -> bool:
    """Whether the backward pass is itself differentiated or vectorised, so that nothing may be done in place."""
    return torch.is_grad_enabled() or any(is_batchedtensor(g) or is_legacy_batchedtensor(g) for g in gradients)


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, state: Momentum) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.work = x0.dtype, state.fixed.work
        return state.token(), state.read()

    @staticmethod
    def backward(ctx: Any, gx: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, None]:
        total = _sum(gx, d, ctx.work)
        return (None if total is None else total.to(ctx.dtype)), None


class Launch(Function):
    @staticmethod
    def forward(ctx: Any, xt: Tensor, y: Tensor, state: Momentum, residual: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.residual, ctx.work = y.dtype, residual, state.fixed.work
        state.launch(y, residual)
        return state.token(), state.token(), state.read()

    @staticmethod
    def backward(ctx: Any, gx: Tensor | None, gv: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:
        gx = _sum(gx, d, ctx.work)
        if gv is None:
            return gx, None, None, None
        gx = _sum(gx, -gv, ctx.work) if ctx.residual else gx
        return gx, gv.to(ctx.dtype), None, None


class Step(Function):
    @staticmethod
    def forward(ctx: Any, xt: Tensor, vt: Tensor, y: Tensor, state: Momentum, k: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        _, _, ctx.gamma, ctx.gain = state.recurrence.factors[k]
        ctx.residual, ctx.thread = state.recurrence.residual, state.thread
        ctx.dtype, ctx.work = y.dtype, state.fixed.work
        out = state.advance(k, y)
        return state.token(), state.token(), out

    @staticmethod
    def backward(ctx: Any, gx: Tensor | None, gv: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:
        if gx is not None and gv is not None and d is not None and not _traced(gx, gv, d):
            gy = torch.empty_like(gx, dtype=ctx.dtype)
            ops.carry_(gx, gv, d, ctx.gamma, ctx.gain, ctx.residual, gy)
            return gx, gv, gy, None, None
        gx = _sum(gx, d, ctx.work)
        s = _sum(gv, gx, ctx.work)
        if s is None:
            return None, None, None, None, None
        gy = s * ctx.gain
        gv = s * ctx.gamma if _traced(s) else s.mul_(ctx.gamma)
        if ctx.residual:
            gx = _sum(gx, -gy, ctx.work)
        return gx, gv, gy.to(ctx.dtype), None, None


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, vt: Tensor, state: Momentum) -> Tensor:
        ctx.work = state.fixed.work
        return state.read_velocity()

    @staticmethod
    def backward(ctx: Any, gv: Tensor) -> tuple[Tensor, None]:
        return gv.to(ctx.work, copy=True), None
