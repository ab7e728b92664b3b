"""One forward pass over a stack of blocks, remembered as its memory mode says.

    run = Forward(x0, recurrence, fixed, mode="reverse")
    for block in blocks:
        run.step(block, extra)
    run.finish()                    # x_K

"reverse" and "checkpoint" run each block in a `Frame`, "store" runs it plainly; without grad mode nothing is remembered.
One pass may do all three, from the first block to the last: reverse, then checkpoint, then store. The tape stays where the
reversed blocks end. All of them take the same integer steps, so the mode changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..core.call import Call, Extra
from ..core.fixedpoint import FixedPoint
from ..core.parts import Memo
from ..core.tape import Frame
from .graph import Enter, Launch, Leave, Step, applied
from .kept import Held
from .later import Later, check_capturable
from .ledger import Ledger, Noted
from .momentum import Momentum, Recurrence
from .proof import Proven
from .rejoin import Rejoin, observed
from .rough import Rough
from .thread import SameThread

Block = Callable[..., Any]
Look = Callable[[int, Frame, list[Tensor]], None]


class Forward:
    """A pass in progress. `x` is the next block's input.

    Args:
        fixed: None: in floats, without gradients, for the largest values alone.
        mode: how the first blocks are remembered.
        kept_from: blocks from this one on keep their input, as in mode "checkpoint"; None: as `mode` says.
        stored_from: blocks from this one on keep their tensors, as in mode "store".
        memo: what is known of the blocks from earlier passes (see `core.parts`).
        later: what is told, with verify="auto", whether the replays repeated the blocks.
        look: shown k, the frame and the tensors that block k would keep if it were stored, for every block that is not.
    """

    def __init__(
        self, x0: Tensor, recurrence: Recurrence, fixed: FixedPoint | None, *,
        mode: str, verify: str = "off", overflow: str = "raise", reversible: bool = False,
        kept_from: int | None = None, stored_from: int | None = None, memo: Memo | None = None, later: Later | None = None,
        look: Look | None = None,
    ) -> None:  # fmt: skip
        self.mode, self.verify, self.memo, self.look, self.k = mode, verify, memo, look, 0
        self.bounds = kept_from, stored_from
        if fixed is None:
            self.state: Momentum = Rough(x0, recurrence, overflow)
        else:
            self.state = Momentum(x0, recurrence, fixed, reversible=reversible, overflow=overflow)
        self.later = Later() if later is None else later
        self.tape, self.like, self.take = Proven(self.state, verify, self.later), Like(x0), applied(Step)
        self._remember()
        if self.tracked:
            self.xt, self.x = Enter.apply(x0, self.state)
            self.vt = self.state.token()
        else:
            self.x = self.state.first()

    def _remember(self) -> None:
        """See how the blocks to come are to be remembered."""
        kept_from, stored_from = self.bounds
        self.tracked = torch.is_grad_enabled()
        self.stored_from = len(self.state.recurrence.gammas) if stored_from is None else stored_from
        if self.mode == "store" or not self.tracked:
            self.stored_from = -1
        self.kept_from = -1 if self.mode == "checkpoint" else self.stored_from if kept_from is None else kept_from
        if self.tracked and self.mode == "reverse":
            check_capturable(self.verify, self.like.device)
            self.state.reversible = True
        self.ledger: Ledger | None = None
        if self.verify != "off" and self.kept_from < self.stored_from:
            self.ledger = self.tape.kept = Ledger(self.stored_from + 1, self.like.device, self.verify, self.later)

    def resume(self, x: Tensor, through: bool, record: bool) -> None:
        """Go on from x, which others have had in between. `through`: what leads to it is to see all of its gradient."""
        self.x = x
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "the blocks before were run in inference_mode, whose tensors cannot be gone on with outside of it. Use torch.no_grad()."
            )
        if not (record and torch.is_grad_enabled()):
            return
        if not self.tracked:  # so far: what the blocks had to do with gradients is nobody's
            self._remember()
            self.state.thread = SameThread() if x.is_cuda else None
            self.xt, self.vt, through = self.state.token(), self.state.token(), True
        if through:
            self._rejoin(x)

    def _rejoin(self, x: Tensor) -> None:
        self.xt = Rejoin.apply(self.xt, x, self.state)
        self.state.entered.add(self.k)

    def launch(self, block: Block, extra: Extra, form: str) -> None:
        """Let v₀ be f of the block on x₀."""
        y = self._output(block, extra, -1, "velocity")
        if self.tracked:
            self.xt, self.vt, self.x = Launch.apply(self.xt, y, self.state, form)
        else:
            self.state.launch(y, form)
            self.x = self.state.read()

    def step(self, block: Block, extra: Extra, name: str | None = None, whole: bool = False) -> Tensor:
        """Run the next block and take its step; the new x. `whole`: in form "relu", the block gives relu(x + f(x)) itself."""
        k = self.k
        if self.tape.at != k and self.state is self.tape.state:
            self.tape.return_to(k)
        if whole:
            self.state.whole.add(k)
        if k == min(self.kept_from, self.stored_from) and self.mode == "reverse":
            self.state = self.state.fork()  # the tape stays here
        x = self.x
        y = self._output(block, extra, k, name or f"block {k}")
        if self.tracked:
            if observed(x) or (x.grad_fn is None and x.requires_grad):
                self._rejoin(x)
            if torch.is_autocast_enabled(self.like.device.type):
                torch.clear_autocast_cache()  # or the block's weights, cast, would be held to the end of the forward pass
            self.xt, self.vt, self.x = self.take(self.xt, self.vt, y, self.state, k)
        else:
            self.x = self.state.advance(k, y)
        self.k = k + 1
        if self.state is self.tape.state:
            self.tape.at = self.k
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
        v, x = (
            (peaks <= limit).all() for peaks, limit in zip(self.state.watch.unbind(1), self.state.limits, strict=True)
        )
        return result * torch.where(v & x, 1.0, float("nan")).to(result.dtype)

    def _output(self, block: Block, extra: Extra, k: int, name: str) -> Tensor:
        x = self.x
        if k >= self.stored_from:
            return self.like.checked(block(x, *extra.args, **extra.kwargs), name)
        kept = self._kept(x.detach(), k) if k >= self.kept_from else None
        call = self.tape.calls[k] = Call(block, extra, name, verified=self.verify == "blocks", memo=self.memo)
        frame = Frame(call, self.tape if kept is None else kept, k)
        y = self.like.checked(frame.run(x, None if self.look is None else partial(self.look, k, frame)), name)
        if kept is None:
            if self.tape.lowest is None and frame.shapes:
                self.tape.lowest = k
            self.tape.mark(k)
        elif self.state.narrow and frame.shapes:
            kept.hold_integers(self.state)
        elif call.writes:  # to its input
            kept.hold(self.state.read())
        return y

    def _kept(self, x: Tensor, k: int) -> Held:
        return Held(x) if self.ledger is None else Noted(x, self.ledger, k)


class Like:
    """What a block's output must be like."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device, self.kind = x.shape, x.dtype, x.device, type(x)

    def checked(self, y: Any, name: str) -> Tensor:
        """y, if it is a tensor of this shape, dtype and device (under autocast its dtype may differ)."""
        if isinstance(y, FakeTensor) and not issubclass(self.kind, FakeTensor):
            raise TypeError(
                f"{name} returned a tensor without values: it has one from a step in which memory was planned, kept outside of "
                "its module. Keep it as a buffer, or plan without a budget."
            )
        if isinstance(y, Tensor) and y.shape == self.shape and y.dtype == self.dtype and y.device == self.device:
            return y
        if not isinstance(y, Tensor):
            raise TypeError(f"{name} returned {type(y).__name__}; it must return one tensor like its input.")
        free = y.is_floating_point() and torch.is_autocast_enabled(self.device.type)
        if y.shape != self.shape or y.device != self.device or (y.dtype != self.dtype and not free):
            raise ValueError(
                f"{name} turned a {tuple(self.shape)} {self.dtype} tensor on {self.device} into a {tuple(y.shape)} {y.dtype} "
                f"tensor on {y.device}. Blocks of a momentum network must keep all three: leave others outside of it."
            )
        return y
