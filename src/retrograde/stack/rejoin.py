"""All of the gradient of a float x, where somebody looks at it.

    Rejoin  (token x, float) → token x

The float x of a layer is given only what comes through the block that it goes into, the rest of its gradient goes by the token
(`graph`).
Where it has a hook, or is to retain its gradient, or comes back as another tensor, `Rejoin` leads all of it through the float, rounded
as that is. A step that gets the values of this sum, because nobody did more than look, takes it apart again and adds up in its own
order and precision: to look changes no bit. (Where a graph of the backward pass is made, or a CUDA graph, it changes the last.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import Function

from .later import capturing_on
from .momentum import Momentum


class Rejoin(Function):
    @staticmethod
    def forward(ctx: Any, xt: Tensor, x: Tensor, state: Momentum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.sums = x.dtype, dict[int, Sum]()  # by backward pass
        sums = ctx.sums

        def all_of_it(d: Tensor) -> None:
            made = sums.pop(torch._C._current_graph_task_id(), None)
            if made is not None:
                made.into(d)

        if x.requires_grad:
            before = list(x._backward_hooks or ())
            x.register_hook(all_of_it)
            hooks: dict[int, Any] = x._backward_hooks  # type: ignore[assignment]
            for others in before:  # they are to see it: autograd goes by the order in which they were put in
                hooks[others] = hooks.pop(others)
        return state.token()

    @staticmethod
    def backward(ctx: Any, p: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if p is None or "_sum" in p.__dict__:  # another one's, of the same x
            return p, None, None
        zero = p.new_zeros(()).expand(p.shape)  # None would say that it was left out
        zero.__dict__["_sum"] = ctx.sums[torch._C._current_graph_task_id()] = Sum(p)
        return zero, torch.zeros_like(p, dtype=ctx.dtype), None  # which makes d an array that nobody else has


class Sum:
    """What goes beside a float x and what comes through it, p and d, in one."""

    d: Tensor | None = None

    def __init__(self, p: Tensor) -> None:
        self.p = p

    def into(self, d: Tensor) -> None:
        """Add p to d in place: `torch.autograd.grad` of x may have taken d already, from before any hook."""
        self.d = d.clone()
        d.add_(self.p)

    def apart(self, g: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """p and d, p as the step after gave it, if g is the sum, by its values: much changes a tensor and leaves no other trace. Else
        0 and g, what others made of it, or may have."""
        p = None if "_left_out" in self.p.__dict__ else self.p
        if self.d is None:
            return p, g  # nothing was added to it
        if g is not None and self._untouched(g, self.d):
            return p, self.d
        return torch.zeros_like(self.p), g

    def _untouched(self, g: Tensor, d: Tensor) -> bool:
        if type(g) is not Tensor or traced(self.p, d, g) or capturing_on(g.device):
            return False
        return g.dtype == d.dtype and torch.equal(g, d.clone().add_(self.p))


def apart(p: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of token x and float x, from before `Rejoin` if they come from there."""
    made: Sum | None = None if p is None else p.__dict__.get("_sum")
    return (p, d) if made is None else made.apart(d)


def observed(x: Tensor) -> bool:
    """Whether somebody looks at the gradient of x, or changes it. FSDP2's hooks and ours do neither."""
    hooks = x._backward_hooks
    return x.retains_grad or bool(hooks and not all(map(_own, hooks.values())))


def _own(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(("torch.distributed.", "retrograde."))


def traced(*gradients: Tensor | None) -> bool:
    """Whether the backward pass is itself differentiated or vectorised, so that nothing may be done in place."""
    return torch.is_grad_enabled() or any(
        g is not None and (is_batchedtensor(g) or is_legacy_batchedtensor(g)) for g in gradients
    )
