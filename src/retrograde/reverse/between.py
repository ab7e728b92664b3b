"""An x between two blocks, where somebody looks at its gradient, or has had it and handed back another tensor.

The float x of a layer is given only the gradient that comes through the block it goes into; the rest of its gradient
goes by the token (`forward`). Where that shows, `Rejoin` leads all of it through the float. In float32 and float64
that changes no bit, unless it is the block that looks at its own input and uses it more than once: the sum is then made
in another order. In 16 bits it rounds the sum as x is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from .forward import Pass


class Rejoin(Function):
    """(token, float x) → a token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, state: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        return state.token()

    @staticmethod
    def backward(ctx: Any, p: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if p is None:
            return None, None, None
        return p.new_zeros(()).expand(p.shape), p.to(ctx.dtype), None  # None would say that gx was left out


def rejoin(run: Pass) -> None:
    """Lead all of the gradient of the next block's input through the float."""
    at = run.state.token_of(run.k)
    run.tokens[at] = Rejoin.apply(run.tokens[at], run.x, run.state)
    run.state.gradient.observed.add(run.k)


def rejoin_if_observed(run: Pass) -> None:
    """The same, if somebody looks."""
    if observed(run.x) or (run.x.grad_fn is None and run.x.requires_grad):
        rejoin(run)


def observed(x: Tensor) -> bool:
    """Whether somebody looks at the gradient of x, or changes it. The hooks of FSDP2 and our own do neither."""
    hooks = x._backward_hooks
    return x.retains_grad or bool(hooks and not all(map(_harmless, hooks.values())))


def _harmless(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(("torch.distributed.", "retrograde."))


def resume(run: Pass, x: Tensor, through: bool) -> None:
    """Go on from x, which others have had in between. `through`: what leads to it is to see all of its gradient."""
    run.x = x
    if run.inference and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "the blocks before were run in inference_mode, whose tensors cannot be gone on with outside of it. Use torch.no_grad()."
        )
    if not torch.is_grad_enabled():
        return
    if not run.tracked:  # so far: the blocks before have no part in gradients
        run.record()
        run.tape.at = run.k
        run.tokens = [run.state.token() for _ in range(run.state.tokens)]
        through = True
    if through:
        rejoin(run)
