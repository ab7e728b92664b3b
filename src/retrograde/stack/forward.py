"""One forward pass over a stack of blocks, remembered as its memory mode says.

    run = Forward(x0, recurrence, fixed, mode="reverse")
    for block in blocks:
        run.step(block, extra)
    run.finish()                    # x_K

"reverse" and "checkpoint" run each block in a `Frame`, "store" runs it plainly; without grad mode nothing is remembered.
All of them take the same integer steps, so the mode changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.call import Call, Extra
from ..core.fixedpoint import FixedPoint
from ..core.tape import Frame, Kept, Tape
from .graph import Enter, Launch, Leave, Step
from .momentum import Momentum, Recurrence

Block = Callable[..., Any]


class Forward:
    """A pass in progress. `x` is the next block's input."""

    def __init__(
        self, x0: Tensor, recurrence: Recurrence, fixed: FixedPoint, *,
        mode: str, verify: str = "off", overflow: str = "raise", reversible: bool = False,
    ) -> None:  # fmt: skip
        self.mode, self.verify, self.k = mode, verify, 0
        self.tracked = torch.is_grad_enabled()
        reversible |= self.tracked and mode == "reverse"
        self.state = Momentum(x0, recurrence, fixed, reversible=reversible, overflow=overflow)
        self.tape = Tape(self.state, verify)
        if self.tracked:
            self.xt, self.x = Enter.apply(x0, self.state)
            self.vt = self.state.token()
        else:
            self.x = self.state.read()

    def launch(self, block: Block, extra: Extra, residual: bool) -> None:
        """Let the block's output on x₀ be v₀ (or x₀ + v₀)."""
        y = self._output(block, extra, -1, "velocity")
        if self.tracked:
            self.xt, self.vt, self.x = Launch.apply(self.xt, y, self.state, residual)
            self.tape.start = self.state.v.clone() if self.verify != "off" else None
        else:
            self.state.launch(y, residual)
            self.x = self.state.read()

    def step(self, block: Block, extra: Extra) -> Tensor:
        """Run the next block and take its step; the new x."""
        y = self._output(block, extra, self.k, f"block {self.k}")
        if self.tracked:
            self.xt, self.vt, self.x = Step.apply(self.xt, self.vt, y, self.state, self.k)
        else:
            self.x = self.state.advance(self.k, y)
        self.k = self.tape.at = self.k + 1
        return self.x

    def finish(self) -> Tensor:
        """The last x."""
        return self._or_nan(self.x)

    def velocity(self) -> Tensor:
        """The last v."""
        return self._or_nan(Leave.apply(self.vt, self.state) if self.tracked else self.state.read_velocity())

    def _or_nan(self, result: Tensor) -> Tensor:
        """The result; where overflow could not be raised on the spot, NaN if there was any."""
        if self.state.eager:
            return result
        good = (self.state.watch <= self.state.watch.new_tensor(self.state.limits)).all()
        return result * torch.where(good, 1.0, float("nan")).to(result.dtype)

    def _output(self, block: Block, extra: Extra, k: int, name: str) -> Tensor:
        x, version, like = self.x, self.x._version if self.tracked else 0, Like(self.x)
        if not self.tracked or self.mode == "store":
            return like.checked(block(x, *extra.args, **extra.kwargs), name)
        verified = self.verify == "blocks" or (self.verify == "end" and self.mode == "checkpoint")
        call = self.tape.calls[k] = Call(block, extra, name, verified=verified)
        frame = Frame(call, self.tape if self.mode == "reverse" else Kept(x.detach()), k)
        y = like.checked(frame.run(x), name)
        if frame.shapes and self.tape.lowest is None:
            self.tape.lowest = k
        if self.mode == "checkpoint" and x._version != version:  # the block wrote to its input
            frame.source = Kept(self.state.read(), private=True)
        return y


class Like:
    """What a block's output must be like."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device

    def checked(self, y: Any, name: str) -> Tensor:
        """y, if it is a tensor of this shape, dtype and device (under autocast its dtype may differ)."""
        if not isinstance(y, Tensor):
            raise TypeError(f"{name} returned {type(y).__name__}; it must return one tensor like its input.")
        free = y.is_floating_point() and torch.is_autocast_enabled(self.device.type)
        if y.shape != self.shape or y.device != self.device or (y.dtype != self.dtype and not free):
            raise ValueError(
                f"{name} turned a {tuple(self.shape)} {self.dtype} tensor on {self.device} into a {tuple(y.shape)} {y.dtype} "
                f"tensor on {y.device}. Blocks of a momentum network must keep all three: leave others outside of it."
            )
        return y
