"""Autograd nodes: tokens carry gradients, integers carry values.

Each node moves the integer state and hands out tokens without storage in its place, so that autograd sees the
recurrence without holding any of it. A node's float output is the next block's input. The same nodes serve every
scheme (`scheme`).

    Enter    (x₀)            → a token, float x₀
    Step     (y, tokens)     → tokens, float x
    Leave    (tokens)        → what the state holds besides: v, or both streams
    Rejoin   (token, float)  → a token

The float x of a layer is given only the gradient that comes through the block it goes into; the rest of its gradient
goes by the token. Where somebody looks at the gradient of x (a hook, `retain_grad`), or x comes back as another
tensor, `Rejoin` leads all of it through the float. In float32 and float64 that changes no bit, unless it is the block
that looks at its own input and uses it more than once: the sum is then made in another order. In 16 bits it rounds
the sum as x is rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import Function

from ..errors import ReplayError
from .scheme import Gradient, Gradients, State


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, state: State) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = x0.dtype
        ctx.gradient = state.gradient
        tokens = [state.token() for _ in range(state.entered)]
        return *tokens, state.read()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        *tokens, d = gradients
        check_unchanged(ctx.gradient, 0, tokens)
        gx = ctx.gradient.enter(tokens, d)
        return (None if gx is None else gx.to(ctx.dtype)), None


class Step(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, state: State, k: int, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.k = k
        ctx.dtype = y.dtype
        ctx.gradient = state.gradient
        x = state.advance(k, y) if k >= 0 else state.launch(y)
        return *[state.token() for _ in range(state.tokens)], x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *tokens, d = gradients
        check_unchanged(ctx.gradient, ctx.k + 1, tokens)
        before, gy = ctx.gradient.vjp(ctx.k, tokens, d, ctx.needs_input_grad[3:])
        if gy is None:
            return None, None, None, *before
        ctx.gradient.given[ctx.k] = [(at, g._version) for at, g in enumerate(before) if g is gy]
        return gy.to(ctx.dtype), None, None, *before


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, state: State, *tokens: Tensor) -> Tensor:
        ctx.gradient = state.gradient
        return state.rest()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradient.leave(gradient)


class Rejoin(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, state: State) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        return state.token()

    @staticmethod
    def backward(ctx: Any, p: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if p is None:
            return None, None, None
        return p.new_zeros(()).expand(p.shape), p.to(ctx.dtype), None  # None would say that gx was left out


def check_unchanged(gradient: Gradient, k: int, tokens: Gradients) -> None:
    """Raise if block k changed the gradient that it was given, which goes on to the step before."""
    for at, version in gradient.given.pop(k, ()):
        g = tokens[at]
        if g is not None and g._version != version:
            raise ReplayError(
                "a gradient was changed in place inside a block's backward pass (by a hook, or by a Function's backward). Return a "
                "changed copy instead."
            )


def observed(x: Tensor) -> bool:
    """Whether somebody looks at the gradient of x, or changes it. The hooks of FSDP2 and our own do neither."""
    hooks = x._backward_hooks
    return x.retains_grad or bool(hooks and not all(map(_harmless, hooks.values())))


def _harmless(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(("torch.distributed.", "retrograde."))


def traced(*gradients: Tensor | None) -> bool:
    """Whether the backward pass is itself differentiated or vectorised, so that nothing may be done in place."""
    return torch.is_grad_enabled() or any(
        g is not None and (is_batchedtensor(g) or is_legacy_batchedtensor(g)) for g in gradients
    )


def keeps_graph() -> bool:
    """Whether the graph may be run through again after this backward pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
