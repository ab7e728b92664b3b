"""The pass: one forward run over a stack of blocks, whatever the scheme, each block remembered in its way.

    run = Pass(state, x0, depth=24, reversed=24)
    for block in blocks:
        run.step(block, extra)
    run.finish()                    # x_K

From the first block to the last, a pass reverses the first ones (their inputs are recalled from the state), keeps the
inputs of the next, and keeps all tensors of the others. The tape stays where the reversed blocks end. All blocks take
the same integer steps, so the way changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import Function

from .again import LAUNCH, Again, Run, look_back, note_run
from .checks import Checks
from .cuda import SameThread
from .deferred import Deferred
from .extra import Extra
from .inputs import check_output
from .kept import Kept
from .nodes import Enter, Leave, Rejoin, Step, observed
from .parts import Memo
from .recurrence import FORMS
from .replay import Call, Frame
from .residual import Residual
from .tape import Tape

Block = Callable[..., Any]
Look = Callable[[int], Any]
_step = super(Function, Step).apply  # without the look-up of function transforms, which are refused


class Pass:
    """A pass in progress. `x` is the next block's input.

    Args:
        state: the `scheme.State` at layer 0, or a `Residual`.
        x0: the network's input.
        depth: how many blocks there will be.
        reversed: how many blocks, from the first on, recall their input from the state.
        kept: how many of the next keep their input. The others keep all their tensors.
        verify: "auto", "strict" or "off": see `checks`.
        memo: what is known of the blocks from earlier passes.
        deferred: where checks on an accelerator are told.
        check: what a block's output must pass.
        look: of block k, what is shown the tensors that it would keep, if it does not keep them (`memory.schedule.Saved`).
    """

    def __init__(
        self, state: Any, x0: Tensor, depth: int, *, reversed: int = 0, kept: int = 0, verify: str = "off",
        memo: Memo | None = None, deferred: Deferred | None = None,
        check: Callable[[Any, Tensor, str], Any] = check_output, look: Look | None = None,
    ) -> None:  # fmt: skip
        self.depth = depth
        self.reversed = reversed
        self.replayed = reversed + kept
        self.verify = "off" if isinstance(x0, FakeTensor) else verify  # without values there is nothing to compare
        self.memo = memo
        self.deferred = Deferred() if deferred is None else deferred
        self.check = check
        self.look = look
        self.device = x0.device
        self.inference = torch.is_inference_mode_enabled()
        self.plain = isinstance(state, Residual)
        self.ran_again = False
        self.again = Again(x0) if not self.plain and state.range.looks_back else None
        self.begin(state, x0)

    def begin(self, state: Any, x0: Tensor) -> None:
        """Stand at layer 0, with this state."""
        self.state = state
        self.k = 0
        self.tokens: list[Tensor] = []
        self._record()
        if self.plain or not self.tracked:
            self.x = state.read()
        else:
            *tokens, self.x = Enter.apply(x0, state)
            self.tokens = [*tokens, *(self.state.token() for _ in range(self.state.tokens - len(tokens)))]

    def _record(self) -> None:
        """See whether gradients are recorded, and prepare what that takes."""
        self.tracked = torch.is_grad_enabled()
        replays = self.tracked and self.replayed > 0
        self.checks = None
        if replays and self.verify != "off":
            self.checks = Checks(self.depth, self.device, self.verify, self.deferred)
        if self.tracked and self.reversed:
            self.state.reversible = True
        self.tape = Tape(self.state, self.checks)
        self.thread = SameThread() if replays and self.device.type == "cuda" else None
        if self.thread is not None and not self.plain:
            # nodes outlive the backward pass: put back inside of it, the setting would be lost
            self.state.gradient.thread = self.thread

    def launch(self, block: Block, extra: Extra, form: str | None = None) -> None:
        """Set the initial velocity to f of the block on x₀. `form`: what the block computes, if not what the others do."""
        noted = None if self.again is None else note_run(self, block, extra, LAUNCH, form)
        self._take(-1, self._output(block, extra, -1, LAUNCH, noted), form)

    def step(self, block: Block, extra: Extra, name: str | None = None, form: str | None = None) -> Tensor:
        """Run the next block and take its step; the new x. `form`: what the block computes, if not what the others do."""
        noted = None if self.again is None else note_run(self, block, extra, name or f"block {self.k}", form)
        k = self.k
        if not self.plain and self.tape.at != k and self.state is self.tape.state:
            self.tape.seek(k)  # a backward pass has been here in between
        if k == self.reversed and k:
            self.state = self.state.copy(reversible=False)  # the tape stays here
        self._rejoin_if_observed()
        self._take(k, self._output(block, extra, k, name or f"block {k}", noted), form)
        self.k = k + 1
        if self.state is self.tape.state:
            self.tape.at = self.k
        if noted is not None:
            noted.ran(self)
        return self.x

    def look_back(self, repeatable: bool = True) -> None:
        """On an accelerator: look whether the pass so far has stayed in its range; if not, run it again, if that can be done."""
        if self.again is not None:
            look_back(self, repeatable)

    def _take(self, k: int, y: Any, form: str | None) -> None:
        """Block k gave y: take its step."""
        state = self.state
        if form is not None and not self.plain:
            state.gradient.forms[k] = FORMS.index(form)
        if self.tracked and not self.plain:
            if k >= 0:
                self._rejoin_if_observed()  # the block may have put a hook on its input
                if torch.is_autocast_enabled(self.device.type):
                    torch.clear_autocast_cache()  # NOTE 7 of `replay`: weights cast for the block would stay until forward ends
            *self.tokens, self.x = _step(y, state, k, *self.tokens)
        else:
            self.x = state.advance(k, y) if k >= 0 else state.launch(y)

    def resume(self, x: Tensor, through: bool) -> None:
        """Go on from x, which others have had in between. `through`: what leads to it is to see all of its gradient."""
        self.x = x
        if self.inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "the blocks before were run in inference_mode, whose tensors cannot be gone on with outside of it. Use torch.no_grad()."
            )
        if self.plain or not torch.is_grad_enabled():
            return
        if not self.tracked:  # so far: the blocks before have no part in gradients
            self._record()
            self.tape.at = self.k
            self.tokens = [self.state.token() for _ in range(self.state.tokens)]
            through = True
        if through:
            self._rejoin()

    def _rejoin(self) -> None:
        """Lead all of the gradient of the next block's input through x."""
        at = self.state.token_of(self.k)
        self.tokens[at] = Rejoin.apply(self.tokens[at], self.x, self.state)
        self.state.gradient.observed.add(self.k)

    def _rejoin_if_observed(self) -> None:
        """Before the block where possible: then its gradients are added up first, as without a look."""
        if self.plain or not self.tracked or self.k in self.state.gradient.observed:
            return
        x = self.x
        if x.retains_grad or (x._backward_hooks and observed(x)) or (x.grad_fn is None and x.requires_grad):
            self._rejoin()

    def finish(self) -> Tensor:
        """The last x."""
        return self.x if self.plain else self.state.range.or_nan(self.x)

    def rest(self) -> Tensor:
        """What the state holds besides: v, or both streams in one."""
        return self.state.range.or_nan(Leave.apply(self.state, *self.tokens) if self.tracked else self.state.rest())

    def _output(self, block: Block, extra: Extra, k: int, name: str, noted: Run | None) -> Tensor:
        """Run a block for the first time, remembered in its way. `noted`: what `again` has noted of it."""
        x = self.x
        if not self.tracked or k >= self.replayed or not self.replayed:  # the last: of what makes v₀, k = −1
            return self.check(block(x, *extra.args, **extra.kwargs), x, name)
        call = Call(block, extra, name, self.memo, noted)
        kept = None if k < self.reversed and self.reversed else Kept(x.detach())
        frame = Frame(call, self.tape if kept is None else kept, k, self.checks, self.thread)
        y = frame.run(x, None if self.look is None else self.look(k))
        alike = type(y) is Tensor and y.shape == x.shape and y.dtype == x.dtype and y.device == x.device
        if not alike or self.check is not check_output:
            y = self.check(y, x, name)
        if kept is None:
            self.tape.note(k, call, saves=bool(frame.shapes))
        elif self.plain:
            call.refuse_writes()
        elif frame.shapes and self.state.fixed.dtype.itemsize < self.state.dtype.itemsize:
            kept.hold_integers(getattr(self.state, self.state.input_name(k)), self.state.fixed, self.state.dtype)
        elif call.writes:  # to its input
            kept.hold(self.state.read())
        return y
