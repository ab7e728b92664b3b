"""One forward pass over a coupling network, remembered as its memory mode says, and its autograd nodes.

    run = Coupled(x0, scheme, fixed, mode="reverse")
    for block in blocks:
        run.step(block, extra)
    run.finish()                    # both streams in one

As in a momentum network (`graph`, `forward`) tokens carry gradients and integers carry values:

    Enter   (x₀)         → token v, token x, float x
    Half    (token, y)   → token, float            the stream that a block moves, and that the next block reads
    Turn    (token)      → token                   the other stream, where both are squeezed
    Leave   (tokens)     → float, both streams in one
    Rejoin  as in a momentum network, but the sum stays rounded as x is: to look may change last digits in bfloat16 and float16

A half adds, so its gradient needs no values: with g the gradient of the moved stream, gy = g and g passes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..core.call import Call, Extra
from ..core.fixedpoint import FixedPoint
from ..core.tape import Frame, Kept
from .coupling import Coupling, Scheme, unsqueeze
from .forward import Like
from .later import Later, check_capturable
from .ledger import Ledger, Noted
from .proof import Proven
from .rejoin import Rejoin, observed


def _sum(a: Tensor | None, b: Tensor | None, work: torch.dtype) -> Tensor | None:
    if a is None or b is None:
        only = b if a is None else a
        return None if only is None else only.to(work)
    return a + b.to(work)


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x0: Tensor, state: Coupling) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.work, ctx.dim, ctx.shape = x0.dtype, state.fixed.work, state.scheme.dim, state.streams[0].shape
        return state.token(), state.token(), state.read()

    @staticmethod
    def backward(ctx: Any, gv: Tensor | None, gx: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, None]:
        gx = _sum(gx, d, ctx.work)
        one = gx if gv is None else gv
        if one is None:
            return None, None
        both = [one.new_zeros(ctx.shape) if g is None else g for g in (gv, gx)]
        return torch.cat(both, ctx.dim).to(ctx.dtype), None


class Half(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, y: Tensor, state: Coupling, k: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.work, ctx.r = y.dtype, state.fixed.work, state.scheme.squeezes[k]
        out = state.advance(k, y)
        return state.token(), out

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, ...]:
        g = _sum(g, d, ctx.work)
        if g is None:
            return None, None, None, None
        g = unsqueeze(g, ctx.r)
        return g, g.to(ctx.dtype), None, None


class Turn(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, state: Coupling, r: int) -> Tensor:
        ctx.r = r
        return state.token()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return unsqueeze(g, ctx.r), None, None


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, vt: Tensor, xt: Tensor, state: Coupling) -> Tensor:
        ctx.work, ctx.dim = state.fixed.work, state.scheme.dim
        return state.both()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        gv, gx = g.to(ctx.work).chunk(2, ctx.dim)
        return gv, gx, None


class Coupled:
    """A pass in progress. `x` is the next block's input."""

    def __init__(
        self, x0: Tensor, scheme: Scheme, fixed: FixedPoint, *,
        mode: str, verify: str = "off", overflow: str = "raise", later: Later | None = None,
    ) -> None:  # fmt: skip
        self.mode, self.verify, self.k = mode, verify, 0
        self.tracked = torch.is_grad_enabled()
        self.state = Coupling(x0, scheme, fixed, overflow=overflow)
        later = Later() if later is None else later
        if self.tracked and mode == "reverse":
            check_capturable(verify, x0.device)
        self.tape, self.ledger = Proven(self.state, verify, later), None
        if self.tracked and verify != "off" and mode == "checkpoint":
            self.ledger = Ledger(len(scheme.squeezes), x0.device, verify, later)
        if self.tracked:
            *self.tokens, self.x = Enter.apply(x0, self.state)
        else:
            self.x = self.state.read()

    def step(self, block: Callable[..., Any], extra: Extra, name: str = "") -> None:
        """Run the next block and take its half-step."""
        x, moved, r = self.x, self.k % 2, self.state.scheme.squeezes[self.k]
        y = self._output(block, extra, name or f"block {self.k}")
        if self.tracked:
            if observed(x) or (x.grad_fn is None and x.requires_grad):
                self.tokens[1 - moved] = Rejoin.apply(self.tokens[1 - moved], x, self.state)
            self.tokens[moved], self.x = Half.apply(self.tokens[moved], y, self.state, self.k)
            if r > 1:
                self.tokens[1 - moved] = Turn.apply(self.tokens[1 - moved], self.state, r)
        else:
            self.x = self.state.advance(self.k, y)
        self.k = self.tape.at = self.k + 1

    def finish(self) -> Tensor:
        """Both streams; where overflow could not be raised on the spot, NaN if there was any."""
        out = Leave.apply(*self.tokens, self.state) if self.tracked else self.state.both()
        if self.state.eager:
            return out
        good = (self.state.watch <= self.state.limits[0]).all()
        return out * torch.where(good, 1.0, float("nan")).to(out.dtype)

    def _output(self, block: Callable[..., Any], extra: Extra, name: str) -> Tensor:
        k, x, like = self.k, self.x, Like(self.x)
        if not self.tracked or self.mode == "store":
            return like.checked(block(x, *extra.args, **extra.kwargs), name)
        version = x._version
        call = self.tape.calls[k] = Call(block, extra, name, verified=self.verify == "blocks")
        kept = Kept(x.detach()) if self.ledger is None else Noted(x.detach(), self.ledger, k)
        frame = Frame(call, self.tape if self.mode == "reverse" else kept, k)
        y = like.checked(frame.run(x), name)
        if frame.shapes and self.tape.lowest is None:
            self.tape.lowest = k
        if self.mode == "reverse":
            self.tape.mark(k)
        elif x._version != version:  # the block wrote to its input
            kept.hold(self.state.read())
        return y
