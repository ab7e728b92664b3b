"""A run of residual blocks inside somebody's model, as one momentum network, driven by the model's own loop.

    for block in self.layers:
        x = block(x, mask)

Each converted block takes one step of the recurrence and hands on the decoded x; the next block knows that tensor as the
continuation of the pass and takes the next step. A tensor that no block of the stage handed on starts a new pass. What is
known is the tensor's memory, untouched since: an alias of it, as hooks of FSDP and `register_full_backward_hook` make,
continues the pass as well.

The fixed-point range comes from a survey of the whole model, without gradients, before its first training step
(`survey`); a pass that finds no range to go by runs on 64-bit integers and leaves one behind.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.call import Call, Extra
from ..core.errors import RangeOverflow, ReplayError
from ..core.fixedpoint import FixedPoint, integer_dtype
from ..core.parts import Memo
from ..core.rational import as_ratios
from ..core.tape import Frame, Kept
from ..memory.budget import Observer, Stack
from ..memory.fake import is_fake
from ..memory.modes import MemoryPlan
from ..stack.calibrate import Range, narrow, peaks, wide
from ..stack.forward import Forward, Like
from ..stack.inputs import check_input, check_surroundings
from ..stack.ledger import Ledger, Noted
from ..stack.momentum import Recurrence
from ..stack.rejoin import observed
from .alias import FSDP2, handed_on, same, version
from .branch import Branch
from .cache import spared
from .own import Own


@dataclass(frozen=True)
class Settings:
    """How the stages of a model are run; the options of `MomentumNet`."""

    gamma: Any = 0.9
    form: str = "block"
    velocity: str | None = None
    memory: str = "auto"
    fraction_bits: int | str = "auto"
    verify: str = "auto"
    overflow: str = "raise"
    state_bits: int | str = "auto"
    compile: tuple[tuple[str, Any], ...] | None = None  # options of torch.compile for the blocks
    insists: bool = False  # on its form, which was asked for


class Pass(Forward):
    """A pass through a stage. `range`: of its mode; `learns`: it was not known when the pass began; `fake`: without values."""

    range: Range
    learns = False
    fake = False
    observer: Observer | None = None


@dataclass(eq=False)
class Open:
    """A pass between two blocks: the x handed on, as it was then."""

    run: Pass
    x: weakref.ref[Tensor]
    version: int

    def left(self) -> Pass:
        """The pass, which goes on. Nothing is left here: the callback of `x` knows this, a circle that would hold the state."""
        run = self.run
        del self.run, self.x
        return run

    def known(self, x: Tensor) -> bool:
        """Whether this is the x that was handed on, untouched."""
        mine = self.x()
        return mine is not None and same(x, mine, self.version)


@dataclass(eq=False)
class Stage:
    """Some blocks of a model, run as one momentum network.

    Args:
        name: where the stage is in the model.
        blocks: how many blocks it has.
        steps: how many steps a pass takes: more where blocks are run more than once.
        settings: the options.
        checkpointed: no momentum; a block that is run again in backward from its kept input.
    """

    name: str
    blocks: int
    steps: int
    settings: Settings
    checkpointed: bool = False
    open: list[Open] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.range = Range(self.settings.fraction_bits, narrow(self.settings.state_bits))
        self.memo = Memo()
        mode, strict = self.settings.memory, self.settings.verify in ("end", "blocks")
        recurrence = self._recurrence(self.settings.gamma)
        self.stack = Stack(self.name, recurrence, "checkpoint" if self.checkpointed else mode, strict)
        self.surveyed = self.checkpointed or self.settings.fraction_bits != "auto"
        self.surveying = self.warned = False
        self.last: MemoryPlan | None = None  # of the last pass
        if self.settings.memory == "reverse" and recurrence.plain:
            raise ValueError(
                "gamma = 0 is a plain residual network, which cannot be run in reverse: its step forgets v. Use "
                "memory='checkpoint', 'store' or 'auto', or a gamma above 0."
            )

    @property
    def gamma(self) -> Fraction | tuple[Fraction, ...]:
        """γ, or one γ per step where they differ. May be set, between passes."""
        ratios = self.recurrence.gammas
        return ratios[0] if len(set(ratios)) == 1 else ratios

    @gamma.setter
    def gamma(self, gamma: Any) -> None:
        self.stack.recurrence = self._recurrence(gamma)

    @property
    def recurrence(self) -> Recurrence:
        """What the stage computes, apart from its blocks."""
        return self.stack.recurrence

    @property
    def used(self) -> str:
        """The memory mode of the last pass."""
        return "" if self.last is None else str(self.last)

    @property
    def rectifies(self) -> bool:
        """Whether the blocks are to give f, and the steps form relu(x + f)."""
        return self.settings.form == "relu" and not self.checkpointed and any(self.recurrence.gammas)

    def take(self, own: Own, index: int, path: str, x: Tensor, extra: Extra) -> Any:
        """Run one block; what it returns, with the next x in it."""
        check_input(x, f"the input of {path}, converted to a momentum step,")
        self.last = plan = self.stack.plan_for(x.dtype)
        if self.checkpointed or not any(self.recurrence.gammas):
            return self._plain(own, path, x, extra, index, plan)
        run = self._continued(x, index, path)
        try:
            if run is None:
                run = self._opened(x, own, extra, plan)
            block = own if run.observer is None else run.observer.watch(run.k, own)
            x1 = run.step(block, extra, path, own.whole)
        except RangeOverflow as error:
            self.range.of(own.block.training).overflowed(None if run is None else run.state.watch)
            raise RangeOverflow(f"stage {self.name!r}: {error}") from error
        if run.k == self.steps or (index + 1 == self.blocks == self.steps):
            x1 = x1 if is_fake(x) and x.device.type == "cpu" else run.finish()
            self._learn(run)
        else:
            self._hand_on(run, x1)
        del run.x  # the tensor handed on leads to the pass, not the other way round
        if self.stack.recorder is not None:
            self.stack.recorder.done()
        return own.with_x(Branch.of(x, x1) if self.settings.form == "branch" else x1)

    def _plain(self, own: Own, path: str, x: Tensor, extra: Extra, k: int, plan: MemoryPlan) -> Any:
        """The block alone: γ = 0, or a block outside of any stage."""
        observer = self.stack.observer(x)
        block = own if observer is None else observer.watch(k, own)
        if not torch.is_grad_enabled() or k >= plan.replayed:
            y = block(x, *extra.args, **extra.kwargs)
        else:
            verify, later = "off" if is_fake(x) else self.settings.verify, self.range.later
            if not k and verify != "off":
                later.collect(x)
            call, version = Call(block, extra, path, verified=verify == "blocks", memo=self.memo), x._version
            kept = Kept(x.detach()) if verify == "off" else Noted(x.detach(), Ledger(1, x.device, verify, later), 0)
            frame = Frame(call, kept, 0)
            y = frame.run(x, None if observer is None else partial(observer.look, k, frame))
            if x._version != version:
                raise ReplayError(
                    f"{path} writes to its input, so its input cannot be kept. Use memory='store' for it."
                )
        if not self.checkpointed:
            Like(x).checked(y, path)
        if self.stack.recorder is not None:
            self.stack.recorder.done()
        return own.with_x(y)

    def _opened(self, x: Tensor, own: Own, extra: Extra, plan: MemoryPlan) -> Pass:
        check_surroundings()
        observer = self.stack.observer(x)
        look = None if observer is None else observer.look
        if is_fake(x):
            integers = FixedPoint(0, integer_dtype(x.dtype, self.recurrence.narrow))
            run = Pass(x, self.recurrence, integers, overflow="nan", memo=self.memo, look=look, **plan.arguments)
            run.fake, run.observer = True, observer
            if self.settings.velocity == "first":
                block = own if observer is None else observer.watch(-1, own)
                run.launch(block, extra, "block" if own.whole else self.recurrence.form)
            return run
        held = self.range.of(own.block.training)
        fixed = None if self.surveying else held.current(x)
        run = Pass(
            x,
            self.recurrence,
            None if self.surveying else fixed or wide(x, self.recurrence, held.fraction),
            verify=self.settings.verify,
            overflow=self.settings.overflow,
            memo=self.memo,
            later=self.range.later,
            look=look,
            **({"mode": "store"} if self.surveying else plan.arguments),
        )
        run.range, run.learns, run.observer = held, fixed is None, observer
        if self.settings.velocity == "first":
            run.launch(own, spared(extra), "block" if own.whole else self.recurrence.form)
        return run

    def _continued(self, x: Tensor, index: int, path: str) -> Pass | None:
        for k, entry in enumerate(self.open):
            if entry.known(x):
                del self.open[k]
                mine, run = entry.x(), entry.left()
                through = mine is not None and mine is not x and (handed_on(x, mine) != FSDP2 or observed(mine))
                run.resume(x, through, record=not self.surveying)
                return run
        if index and torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                f"{path} is run again inside a backward pass, from the middle of the stage {self.name!r}: the model checkpoints its "
                "activations itself. Turn that off (gradient_checkpointing_disable(), set_grad_checkpointing(False))."
            )
        if index and not (self.warned or self.surveying or is_fake(x)):
            self.warned = True
            warnings.warn(
                f"{path} was given something other than the output of the block before it, so its velocity starts from 0 again. "
                f"If the model changes x between the blocks of {self.name!r}, leave that stage out or name shorter ones.",
                stacklevel=6,
            )
        return None

    def _hand_on(self, run: Pass, x: Tensor) -> None:
        entry = Open(run, weakref.ref(x, lambda _: self._forget(entry)), version(x))
        self.open.append(entry)

    def _forget(self, entry: Open) -> None:
        """The pass went no further: nobody has its x."""
        if entry in self.open:
            self.open.remove(entry)
            try:
                self._learn(entry.run)
            except RangeOverflow as error:
                warnings.warn(str(error), stacklevel=2)  # nobody calls this who could be told otherwise

    def _learn(self, run: Pass) -> None:
        """Take note of the largest values of a pass."""
        if run.fake:
            return
        try:
            if not self.surveying:
                run.range.seen(run.state)
            if run.learns:
                seen = peaks(run.state.watch, run.state.fixed)
                run.range.calibrate(run.state.dtype, *seen, self.recurrence.most_guard)
        except RangeOverflow as error:
            raise RangeOverflow(f"stage {self.name!r}: {error}") from error

    def _recurrence(self, gamma: Any) -> Recurrence:
        return Recurrence(as_ratios(gamma, self.steps), self.settings.form, self.range.narrow)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "open": []}
