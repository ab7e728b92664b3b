"""The pass: one forward run over a stack of blocks, whatever the scheme, each block remembered in its way.

    run = Pass(state, x0, depth=24, reversed=24)
    for block in blocks:
        run.step(block, extra)
    run.look_back()                 # on an accelerator: was a value beyond the range?
    run.finish()                    # returns x_K

From the first block to the last, a pass reverses the first ones (their inputs are recalled from the state), keeps the
inputs of the next, and keeps all tensors of the others. The tape stays where the reversed blocks end. All blocks take
the same integer steps, so the way changes no bit of the result.

Each step is a node in autograd's graph. Tokens carry gradients, integers carry values: a node moves the integer state
and hands out tokens without storage in its place, so that autograd sees the recurrence without holding any of it. Its
float output is the next block's input, and d in `Gradient.vjp` is the gradient that comes back by it.

    Enter    (x₀)            → tokens, float x₀
    Step     (y, tokens)     → tokens, float x
    Leave    (tokens)        → what the state holds besides: v, or both streams
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import Function

from ..errors import ReplayError
from .again import LAUNCH, Again, look_back, note_run
from .between import rejoin_if_observed
from .checks import Checks
from .cuda import SameThread
from .deferred import Deferred
from .extra import Extra
from .inputs import check_output
from .kept import Kept
from .parts import Memo
from .recurrence import FORMS
from .replay import Call, Frame
from .scheme import Gradient, Gradients, State
from .tape import Tape

Block = Callable[..., Any]


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
        _check_unchanged(ctx.gradient, 0, tokens)
        gx = ctx.gradient.enter(tokens, d)
        return (None if gx is None else gx.to(ctx.dtype)), None


class Step(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, state: Any, k: int, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.k = k
        ctx.dtype = y.dtype
        ctx.gradient = state.gradient
        x = state.advance(k, y) if k >= 0 else state.launch(y)
        return *[state.token() for _ in range(state.tokens)], x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *tokens, d = gradients
        _check_unchanged(ctx.gradient, ctx.k + 1, tokens)
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


_step = super(Function, Step).apply  # without the look-up of function transforms, which are refused


def _check_unchanged(gradient: Gradient, k: int, tokens: Gradients) -> None:
    """Raise if block k changed the gradient that it was given, which goes on to the step before."""
    for at, version in gradient.given.pop(k, ()):
        g = tokens[at]
        if g is not None and g._version != version:
            raise ReplayError(
                "a gradient was changed in place inside a block's backward pass (by a hook, or by a Function's backward). Return a "
                "changed copy instead."
            )


class Pass:
    """A pass in progress. `x` is the next block's input.

    Args:
        state: the `scheme.State` at layer 0.
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

    start: Tensor  # the hash of the state at layer 0, of a pass that is to be inverted

    def __init__(
        self, state: Any, x0: Tensor, depth: int, *, reversed: int = 0, kept: int = 0, verify: str = "off",
        memo: Memo | None = None, deferred: Deferred | None = None,
        check: Callable[[Any, Tensor, str], Any] = check_output,
        look: Callable[[int], Any] | None = None,
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
        self.ran_again = False
        self.begin(state, x0)

    def begin(self, state: Any, x0: Tensor) -> None:
        """Stand at layer 0, with this state."""
        self.state = state
        self.k = 0
        self.again = Again(x0) if state.range.looks_back else None
        self.record()
        self.tokens: list[Tensor] = []
        if self.tracked:
            *tokens, self.x = Enter.apply(x0, state)
            self.tokens = [*tokens, *(state.token() for _ in range(state.tokens - len(tokens)))]
        else:
            self.x = state.read()

    def record(self) -> None:
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
        if self.thread is not None and self.state.gradient is not None:
            # nodes outlive the backward pass: put back inside of it, the setting would be lost
            self.state.gradient.thread = self.thread

    def launch(self, block: Block, extra: Extra, form: str | None = None) -> None:
        """Set the initial velocity to f of the block on x₀. `form`: what the block computes, if not what the others do."""
        if self.again is not None:
            note_run(self, block, extra, LAUNCH, form)
        self._take(-1, self._output(block, extra, -1, LAUNCH), form)

    def step(self, block: Block, extra: Extra, name: str | None = None, form: str | None = None) -> Tensor:
        """Run the next block and take its step. Returns the new x. `form`: "block", in a network of form "relu" (see `forms`)."""
        k, name = self.k, name or f"block {self.k}"
        if self.again is not None:
            note_run(self, block, extra, name, form)
        if self.tape.at != k and self.state is self.tape.state:
            self.tape.seek(k)  # a backward pass has been here in between
        if k == self.reversed and k:
            self.state = self.state.copy(reversible=False)  # the tape stays here
        self._look_at_x()
        self._take(k, self._output(block, extra, k, name), form)
        self.k = k + 1
        if self.state is self.tape.state:
            self.tape.at = self.k
        if self.again is not None:
            self.again.ran(self)
        return self.x

    def look_back(self, repeatable: bool = True) -> None:
        """On an accelerator: look whether the pass so far has stayed in its range; if not, run it again, if that can be done."""
        if self.again is not None:
            look_back(self, repeatable)

    def finish(self) -> Tensor:
        """The last x."""
        return self.state.range.or_nan(self.x)

    def rest(self) -> Tensor:
        """What the state holds besides: v, or both streams in one."""
        return self.state.range.or_nan(Leave.apply(self.state, *self.tokens) if self.tracked else self.state.rest())

    def _look_at_x(self) -> None:
        """Does somebody look at x? Before the block where possible: then its gradients are added up first, as without a look."""
        x = self.x
        looked_at = x.retains_grad or x._backward_hooks or (x.grad_fn is None and x.requires_grad)
        if looked_at and self.tracked and self.k not in self.state.gradient.observed:
            rejoin_if_observed(self)

    def _output(self, block: Block, extra: Extra, k: int, name: str) -> Any:
        """Run a block for the first time, remembered in its way."""
        x = self.x
        if not self.tracked or k >= self.replayed or not self.replayed:  # the last: of what makes v₀, k = −1
            return self.check(block(x, *extra.args, **extra.kwargs), x, name)
        call = Call(block, name, self.memo, None if self.again is None else self.again.runs[-1])
        source = self.tape if k < self.reversed and self.reversed else Kept(x.detach())
        frame = Frame(call, source, k, self.checks, self.thread)
        y = frame.run(x, extra, None if self.look is None else self.look(k))
        alike = type(y) is Tensor and y.shape == x.shape and y.dtype == x.dtype and y.device == x.device
        if not alike or self.check is not check_output:
            y = self.check(y, x, name)
        source.note(k, call, bool(frame.shapes), self.state)
        return y

    def _take(self, k: int, y: Any, form: str | None) -> None:
        """Block k gave y: take its step."""
        state = self.state
        if form is not None:
            state.gradient.forms[k] = FORMS.index(form)
        if self.tracked:
            if k >= 0:
                self._look_at_x()  # the block may have put a hook on its input
                if torch.is_autocast_enabled(self.device.type):
                    torch.clear_autocast_cache()  # NOTE 7 of `replay`: weights cast for the block would stay until forward ends
            *self.tokens, self.x = _step(y, state, k, *self.tokens)
        else:
            self.x = state.advance(k, y) if k >= 0 else state.launch(y)
