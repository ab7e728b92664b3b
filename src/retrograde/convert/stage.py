"""A run of residual blocks inside somebody's model, as one momentum network, driven by the model's own loop.

    for block in self.layers:
        x = block(x, mask)

Each converted block takes one step of the recurrence and hands on the decoded x. The next block knows that tensor as the continuation
of the pass and takes the next step. A tensor that no block of the stage handed on starts a new pass. What is known is the tensor's
memory, untouched since: an alias of it, as hooks of FSDP and `register_full_backward_hook` make, continues the pass as well.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from ..errors import RangeOverflow, ReplayError
from ..memory.budget import Observer
from ..memory.fake import is_fake
from ..memory.modes import MemoryPlan, parse_memory
from ..memory.stack import Stack
from ..nets.saved import written
from ..reverse.extra import Extra
from ..reverse.forward import Pass
from ..reverse.inputs import any_output, check_input, check_output
from ..reverse.momentum import Momentum
from ..reverse.nodes import observed
from ..reverse.parts import Memo, version
from ..reverse.range import Range
from ..reverse.recurrence import Recurrence, gamma_of, recurrence_of
from ..reverse.residual import Residual
from ..reverse.sign import Signed
from .next_x import FSDP2, Branch, handed_on, same
from .own import Own, spared
from .unseen import Unseen


@dataclass(frozen=True)
class Settings:
    """How the stages of a model are run; the options of `MomentumNet`."""

    gamma: Any = None
    form: str = "block"
    velocity: str | None = None
    memory: str | int | float = "auto"
    fixed_point: str | FixedPoint = "auto"
    verify: str = "auto"
    overflow: str = "raise"
    compile: tuple[tuple[str, Any], ...] | None = None  # options of torch.compile for the blocks
    insists: bool = False  # on its form, which was asked for


class Open:
    """A pass between two blocks: the x handed on, as it was then, and who else watches the pass."""

    def __init__(self, run: Pass, x: Tensor, training: bool, observer: Observer | None, unseen: Unseen) -> None:
        self.run = run
        self.unseen = unseen
        self.hashed = unseen.hashed(x)
        self.x: weakref.ref[Tensor] = weakref.ref(x)
        self.version = version(x)
        self.training = training
        self.observer = observer

    def known(self, x: Tensor) -> bool:
        """Whether this is the x that was handed on, untouched."""
        mine = self.x()
        return mine is not None and same(x, mine, self.version)


class OpenPasses(threading.local):
    """The passes of a stage that are between two blocks, those of each thread for itself. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self.passes: list[Open] = []
        self.ended: Callable[[], Tensor | None] = lambda: None  # what the last pass returned

    def __reduce__(self) -> Any:
        return OpenPasses, ()


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
    open: OpenPasses = field(default_factory=OpenPasses, repr=False)

    def __post_init__(self) -> None:
        self.range = Range(self.settings.fixed_point)
        self.memo = Memo()
        self.warned = set[str]()
        self.restarted = set[int]()  # blocks at which v started anew in training
        self.last: MemoryPlan | None = None  # of the last pass
        self.records: list[dict[str, Any]] = []  # of it, in configs
        self.told: list[str] = []  # of the last `load_state_dict` that was warned of
        mode, _ = parse_memory(self.settings.memory)
        recurrence = self._recurrence(self.settings.gamma)
        if mode == "reverse" and recurrence.plain:
            raise ValueError(
                "gamma = 0 is a plain residual network, which cannot be run in reverse: its step forgets v. Use "
                "memory='checkpoint', 'store' or 'auto', or a gamma above 0."
            )
        self.stack = Stack(self.name, recurrence, "checkpoint" if self.checkpointed else mode)

    @property
    def gamma(self) -> Any:
        """γ as a ratio, or one ratio per step where they differ; a `RandomSign` of that. May be set, between passes."""
        return gamma_of(self.recurrence)

    @gamma.setter
    def gamma(self, gamma: Any) -> None:
        self.stack.recurrence = self._recurrence(gamma)
        for record in self.records:
            record["gamma"] = self.described["gamma"]

    @property
    def described(self) -> dict[str, Any]:
        """The stage for a `state_dict` or a config. Forms "block" and "relu" are one network."""
        return {
            "stage": self.name,
            "gamma": written(self.gamma),
            "form": "branch" if self.settings.form == "branch" else "block",
            "velocity": self.settings.velocity,
        }

    @property
    def recurrence(self) -> Recurrence:
        """What the stage computes, apart from its blocks."""
        return self.stack.recurrence

    @property
    def used(self) -> str:
        """The memory mode of the last pass."""
        return "" if self.last is None else str(self.last)

    def alone(self, block: Any, x: Tensor) -> bool:
        """Whether the block runs by itself: γ = 0, in evaluation too if signs are random, or a block outside of any stage."""
        if self.checkpointed or self.recurrence.residual:
            return True
        plain = self.recurrence.residual if block.training else self.recurrence.in_evaluation.residual
        return plain and not any(e.known(x) for e in self.open.passes)

    def rectifies(self, block: Any, x: Tensor) -> bool:
        """Whether the block is to give f, and the step forms relu(x + f)."""
        return self.settings.form == "relu" and not self.alone(block, x)

    @property
    def rerun(self) -> bool:
        """Whether blocks are run again in backward."""
        return self.settings.memory != "store"

    def take(self, own: Own, index: int, path: str, x: Tensor, extra: Extra) -> Any:
        """Run one block; what it returns, with the next x in it."""
        check_input(x, f"the input of {path}, converted to a momentum step,")
        alone = self.alone(own.block, x)
        self.last = self.stack.plan_for(x.dtype, not alone)
        if alone:
            return own.with_x(self._alone(own, path, x, extra, index))
        training = own.block.training
        entry = self._continued(x, index, path, training)
        try:
            if entry is None:
                run, observer = self._opened(x, own, extra)
                unseen = Unseen(run.verify, self.range.deferred)
            else:
                run, observer, training, unseen = entry.run, entry.observer, entry.training, entry.unseen
            block = own if observer is None else observer.watch(run.k, own)
            x1 = run.step(block, extra, path, "block" if own.whole else None)
        except RangeOverflow as error:
            raise RangeOverflow(f"stage {self.name!r}: {error}") from error
        if run.k == self.steps or (index + 1 == self.blocks == self.steps):
            x1 = run.finish()
            unseen.end()
            self._learn(run, training)
            self.open.ended = weakref.ref(x1)
        else:
            if x1.is_inference():
                with torch.inference_mode(False), torch.no_grad():
                    x1 = x1.clone()  # has a version, by which a change is seen
            self._hand_on(Open(run, x1, training, observer, unseen))
        del run.x  # the tensor handed on leads to the pass, not the other way round
        if self.stack.recorder is not None:
            self.stack.recorder.done()
        return own.with_x(Branch.of(x, x1, unseen, path) if self.settings.form == "branch" else x1)

    def _alone(self, own: Own, path: str, x: Tensor, extra: Extra, k: int) -> Any:
        """One block by itself."""
        assert self.last is not None
        recorder = self.stack.recorder
        observer = None if recorder is None else recorder.observer(self.stack, x, training=False)
        run = Pass(
            Residual(x, "block"), x, 1, kept=int(k < self.last.replayed), verify=self.settings.verify, memo=self.memo,
            deferred=self.range.deferred, check=any_output if self.checkpointed else check_output,
            look=None if observer is None else lambda _, frame, tensors: observer.look(k, frame, tensors),
        )  # fmt: skip
        if not k:
            self.range.deferred.collect(x)
        y = run.step(own if observer is None else observer.watch(k, own), extra, path)
        if self.stack.recorder is not None:
            self.stack.recorder.done()
        return y

    def _opened(self, x: Tensor, own: Own, extra: Extra) -> tuple[Pass, Observer | None]:
        assert self.last is not None
        recorder = self.stack.recorder
        observer = None if recorder is None else recorder.observer(self.stack, x)
        seen = self.range.begin(
            x,
            self.steps + 1,
            training=own.block.training,
            overflow=self.settings.overflow,
            most_guard=self.recurrence.most_guard,
        )
        kind = Signed if self.recurrence.signed else Momentum
        state = kind(x, self.recurrence, seen, reversible=self.last.reversed == self.steps)
        run = Pass(
            state, x, self.steps, reversed=self.last.reversed, kept=self.last.kept, verify=self.settings.verify, memo=self.memo,
            deferred=self.range.deferred, look=None if observer is None else observer.look,
        )  # fmt: skip
        if self.settings.velocity == "first":
            block = own if observer is None else observer.watch(-1, own)
            run.launch(block, spared(extra), "block" if own.whole else None)
        return run, observer

    def _continued(self, x: Tensor, index: int, path: str, training: bool) -> Open | None:
        """The pass that handed on this x, going on from it."""
        passes = self.open.passes
        entry = next((entry for entry in passes if entry.known(x)), None)
        if entry is not None:
            passes.remove(entry)
            if index in self.restarted and training:
                self.restarted.remove(index)
            elif index in self.restarted:
                self._warn(
                    "evaluation",
                    f"in training {path} was given something other than the output of the block before it (dropout between the blocks, "
                    "say), so v started from 0 there. Here it is given that output, and v goes on: this is another network than the "
                    f"trained one. Name shorter stages than {self.name!r}, or move the dropout into the blocks.",
                )
            mine = entry.x()
            entry.unseen.compare(x, entry.hashed, f"the x that {path} was given")
            if not entry.run.tracked and mine is not None and mine.grad_fn is not None and torch.is_grad_enabled():
                raise ReplayError(
                    f"{path} goes on with a pass whose blocks ran without gradients, and gets a gradient for them all the same: "
                    "the model checkpoints its activations itself, with use_reentrant=True. Turn that off; converted blocks need "
                    "no checkpoints."
                )
            through = mine is not None and mine is not x and (handed_on(x, mine) != FSDP2 or observed(mine))
            entry.run.resume(x, through)
            return entry
        if index and torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                f"{path} is run again inside a backward pass, from the middle of the stage {self.name!r}: the model checkpoints its "
                "activations itself. Turn that off (gradient_checkpointing_disable(), set_grad_checkpointing(False))."
            )
        if is_fake(x):
            return None
        if index and training:
            self.restarted.add(index)
        if index:
            self.warn_restart(path)
        elif x is self.open.ended():
            self._warn(
                "loop",
                f"{path} was given the output of its own stage: the model runs {self.name!r} several times in a row, and v starts from "
                "0 each time. One pass over all of them is another network: rg.convert(model, example) finds it where the blocks are "
                "of no known class, and MomentumNet(blocks * times) is it.",
            )
        return None

    def warn_restart(self, path: str) -> None:
        """Say once that a pass begins in the middle of the stage."""
        self._warn(
            "restart",
            f"{path} was given something other than the output of the block before it, so its velocity starts from 0 again. "
            f"If the model changes x between the blocks of {self.name!r}, leave that stage out or name shorter ones.",
        )

    def _warn(self, kind: str, message: str) -> None:
        """Once of each kind."""
        if kind not in self.warned:
            self.warned.add(kind)
            warnings.warn(message, stacklevel=8)

    def _hand_on(self, entry: Open) -> None:
        passes = self.open.passes
        passes.append(entry)
        x = entry.x()
        assert x is not None
        weak = weakref.ref(entry)

        def forget(_: Any) -> None:
            """The pass went no further: nobody has its x."""
            entry = weak()
            if entry is not None and entry in passes:
                passes.remove(entry)
                try:
                    entry.unseen.end()
                    self._learn(entry.run, entry.training)
                except (RangeOverflow, ReplayError) as error:
                    warnings.warn(str(error), stacklevel=2)  # nobody calls this who could be told otherwise

        entry.x = weakref.ref(x, forget)

    def _learn(self, run: Pass, training: bool) -> None:
        """Take note of the largest values of a pass."""
        try:
            self.range.learn(run.state.range, training, self.recurrence.most_guard)
        except RangeOverflow as error:
            raise RangeOverflow(f"stage {self.name!r}: {error}") from error

    def _recurrence(self, gamma: Any) -> Recurrence:
        return recurrence_of(gamma, self.steps, self.settings.form, self.range.narrow)
