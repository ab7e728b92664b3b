"""A run of residual blocks inside somebody's model, as one momentum network, driven by the model's own loop.

    for block in self.layers:
        x = block(x, mask)

Each converted block takes one step of the recurrence and hands on the decoded x. The next block knows that tensor as the continuation
of the pass and takes the next step. A tensor that no block of the stage handed on starts a new pass. What is known is the tensor's
memory, untouched since: an alias of it, as hooks of FSDP and `register_full_backward_hook` make, continues the pass as well.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arithmetic.fixed import FixedPoint
from ..errors import RangeOverflow, ReplayError
from ..memory.fake import is_fake
from ..memory.modes import MemoryPlan, Stack, parse_memory
from ..nets.saved import written
from ..reverse.between import observed, resume
from ..reverse.extra import Extra
from ..reverse.forward import Pass
from ..reverse.inputs import any_output, check_output
from ..reverse.momentum import Momentum
from ..reverse.parts import Memo
from ..reverse.range import Range
from ..reverse.recurrence import Recurrence, gamma_of, recurrence_of
from ..reverse.residual import PlainPass
from ..reverse.sign import Signed
from .branch import Branch
from .caches import spared
from .checkpointing import REENTRANT
from .next_x import FSDP2, Open, OpenPasses, Unseen, Waiting, handed_on
from .probe import edge_of, skips

if TYPE_CHECKING:
    from .block import Own


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
    insists: bool = False  # on its form, which was asked for
    split: bool = False  # attention and MLP are steps of their own


@dataclass(eq=False)
class Stage:
    """Some blocks of a model, run as one momentum network.

    Args:
        name: where the stage is in the model.
        blocks: how many blocks it has.
        steps: how many steps a pass takes: more where blocks are run more than once.
        settings: the options.
        checkpointed: no momentum; a block that is run again in backward from its kept input.
        trusted: it is known what the blocks compute. Else the user named them, and the first calls show it.
    """

    name: str
    blocks: int
    steps: int
    settings: Settings
    checkpointed: bool = False
    trusted: bool = True
    open: OpenPasses = field(default_factory=OpenPasses, repr=False)
    waiting: Waiting = field(default_factory=Waiting, repr=False)

    def __post_init__(self) -> None:
        self.range = Range(self.settings.fixed_point)
        self.memo = Memo()
        self.warned = set[str]()
        self.restarted = set[int]()  # blocks at which v started anew in training
        self.stepwise = False  # look at the range after every step, also where that makes the host wait
        self.skips: dict[str, bool | None] = {}  # of a stage that is not trusted: whether a block returns x + f(x)
        self.joined = False  # whether a block was ever given what the one before it led to
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
            **({"split": True} if self.settings.split else {}),
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

    def take(self, own: Own, index: int, path: str, x: Tensor, extra: Extra, alone: bool) -> Any:
        """Run one block, by itself or as a step; what it returns, with the next x in it."""
        self.last = self.stack.plan_for(x.dtype, not alone)
        try:
            x1 = self._alone(own, path, x, extra, index) if alone else self._step(own, path, x, extra, index)
        except RangeOverflow as error:
            raise RangeOverflow(f"stage {self.name!r}: {error}") from error
        if self.stack.recorder is not None:
            self.stack.recorder.done()
        return own.with_x(x1)

    def _step(self, own: Own, path: str, x: Tensor, extra: Extra, index: int) -> Tensor:
        """One step of a pass: of the one that handed on this x, or of a new one."""
        entry = self._continued(x, index, path, own.block.training) or self._opened(x, own, path, extra)
        self.open.latest = index
        run = entry.run
        block = own if entry.observer is None else entry.observer.watch(run.k, own)
        x1 = run.step(block, extra, path, "block" if own.whole else None)
        if run.k == self.steps:
            self._look_back(run)
            x1 = run.finish()
            self._ended(entry)
            self.open.ended = weakref.ref(x1)
        else:
            if x1.is_inference():
                with torch.inference_mode(False), torch.no_grad():
                    x1 = x1.clone()  # has a version, by which a change is seen
            self._hand_on(entry, x1, index)
        del run.x  # the tensor handed on leads to the pass, not the other way round
        if self.settings.form != "branch":
            return x1
        self.open.changed = []
        return Branch.of(x, x1, entry.unseen, path, self.open.changed)

    def _alone(self, own: Own, path: str, x: Tensor, extra: Extra, k: int) -> Any:
        """One block by itself."""
        assert self.last is not None
        recorder = self.stack.recorder
        observer = None if recorder is None else recorder.observer(self.stack, x, training=False)
        run = PlainPass(
            x, "block", 1, kept=int(k < self.last.replayed), verify=self.settings.verify, memo=self.memo,
            deferred=self.range.deferred, check=any_output if self.checkpointed else check_output,
            look=None if observer is None else lambda _: observer.look(k),
        )  # fmt: skip
        if not k:
            self.range.deferred.collect(x)
        return run.step(own if observer is None else observer.watch(k, own), extra, path)

    def _opened(self, x: Tensor, own: Own, path: str, extra: Extra) -> Open:
        """A new pass, which begins with this block."""
        assert self.last is not None
        recorder = self.stack.recorder
        observer = None if recorder is None else recorder.observer(self.stack, x)
        seen = self.range.begin(
            x,
            self.steps + 1,
            training=own.block.training,
            overflow=self.settings.overflow,
            most_guard=self.recurrence.most_guard,
            stepwise=self.stepwise
            or not torch.is_grad_enabled(),  # the model may make something of an x: no second run
        )
        unseen = not self.trusted and path not in self.skips and torch.is_grad_enabled() and not x.requires_grad
        if unseen and any(p.requires_grad for p in own.block.parameters()):
            x = x.detach().requires_grad_()  # so that its way to the output is seen
        kind = Signed if self.recurrence.signed else Momentum
        state = kind(x, self.recurrence, seen, reversible=self.last.reversed == self.steps)
        run = Pass(
            state, x, self.steps, reversed=self.last.reversed, kept=self.last.kept, verify=self.settings.verify, memo=self.memo,
            deferred=self.range.deferred, look=None if observer is None else observer.look,
            check=check_output if self.trusted else self._check_skip,
        )  # fmt: skip
        if self.settings.velocity == "first":
            block = own if observer is None else observer.watch(-1, own)
            run.launch(block, spared(extra), "block" if own.whole else None)
        return Open(run, own.block.training, observer, Unseen(run.verify, self.range.deferred))

    def _continued(self, x: Tensor, index: int, path: str, training: bool) -> Open | None:
        """The pass that handed on this x, going on from it."""
        passes = self.open.passes
        entry = next((entry for entry in passes if entry.known(x)), None)
        if entry is not None:
            passes.remove(entry)
            if entry.index == index and self.steps == self.blocks > 1:
                raise ValueError(
                    f"stage {self.name!r}: {path} is run twice in a row, and has one step in this stage. Pass an example, without "
                    "stages, to have one step for each call: rg.convert(model, example)."
                )
            self.joined = True
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
            if not entry.run.tracked and mine is not None and mine.grad_fn is not None:
                raise ReplayError(
                    f"{path} goes on with a pass whose blocks ran without gradients, and gets a gradient for them all the same: "
                    f"{REENTRANT}"
                )
            through = mine is not None and mine is not x and (handed_on(x, mine) != FSDP2 or observed(mine))
            if mine is not x or observed(x):
                self.stepwise = True  # in a second run, what leads to this x, or looks at it, would be lost
                entry.run.look_back(repeatable=False)
            resume(entry.run, x, through)
            return entry
        if index and torch._C._current_graph_task_id() != -1:
            raise ReplayError(
                f"{path} is run again inside a backward pass, from the middle of the stage {self.name!r}: a checkpoint holds it "
                "together with something that is not converted. Let it hold whole stages, or blocks alone; or turn the model's "
                "checkpointing off."
            )
        if index and not is_fake(x):
            self.restart(x, index, path)
            if training:
                self.restarted.add(index)
        elif not index and x is self.open.ended():
            self._warn(
                "loop",
                f"{path} was given the output of its own stage: the model runs {self.name!r} several times in a row, and v starts from "
                "0 each time. One pass over all of them is another network: rg.convert(model, example) finds it where the blocks are "
                "of no known class, and MomentumNet(blocks * times) is it.",
            )
        return None

    def _check_skip(self, y: Any, x: Tensor, path: str) -> Any:
        """`check_output`, and whether the block returns x + f(x), where gradients show it."""
        y = check_output(y, x, path)
        if self.settings.form == "block" and path not in self.skips and edge_of(x) is not None:
            found = self.skips[path] = skips(edge_of(y), edge_of(x))
            if found is False and not self.settings.insists:
                raise ValueError(
                    f"stage {self.name!r}: {path} does not return x + f(x), but f(x): only matrix products and convolutions lead from "
                    "x to what it returns. If the model adds that to x as it is, pass form='branch'. If it is no residual block, leave "
                    "it out, or take it as it is with form='block'."
                )
        return y

    def restart(self, x: Tensor, index: int, path: str) -> None:
        """A pass begins in the middle of the stage. Raise if that is because the blocks are not of its form; else say it once."""
        branch = self.settings.form == "branch"
        if isinstance(x, Branch):
            raise ValueError(
                f"stage {self.name!r}: {path} was given what the block before it returned, and form='branch' says that the model adds "
                "x to that. Pass form='block' for blocks that return x + f(x). Others are no residual blocks: leave them out."
            )
        if branch and self.open.changed:
            raise ValueError(
                f"stage {self.name!r}: the model does not add what the block before {path} returned to x as it is, but calls "
                f"{self.open.changed[0]} on it first: a factor, say, or dropout. Do that inside of the block: a step of a momentum "
                "network adds f(x) as it is."
            )
        seen = self.skips.values()
        never = index == self.open.latest + 1 == self.blocks - 1 and not self.joined and True not in seen
        if not self.trusted and (False in seen or never):
            raise ValueError(
                f"stage {self.name!r}: {path} was not given what the block before it "
                + ("returned, added to x" if branch else "returned")
                + ", so these blocks are no steps of one momentum network as they were named. "
                + (
                    ""
                    if branch
                    else "Pass form='branch' if the model adds what they return to x as it is (x + block(x)). "
                )
                + "Do what else the model does between them, such as a factor or a normalisation, inside of the blocks, or leave the "
                "stage out."
            )
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

    def _hand_on(self, entry: Open, x: Tensor, index: int) -> None:
        passes, weak = self.open.passes, weakref.ref(entry)

        def gone(_: Any) -> None:
            """The pass went no further: nobody has its x."""
            entry = weak()
            if entry is not None and entry in passes:
                passes.remove(entry)
                try:
                    self._ended(entry)
                except (RangeOverflow, ReplayError) as error:  # nobody calls this who could be told otherwise
                    warnings.warn(f"stage {self.name!r}: {error}", stacklevel=2)

        entry.hand_on(x, index, gone)
        passes.append(entry)

    def _ended(self, entry: Open) -> None:
        """Take note of the largest values of a pass, and of what was found between its blocks."""
        entry.unseen.end()
        self.range.learn(entry.run.state.range)

    def _look_back(self, run: Pass) -> None:
        """At the end of a pass, on an accelerator: look at its range, and run it again if it was left."""
        run.look_back()
        if run.ran_again:
            self._warn(
                "again",
                f"stage {self.name!r} left its range on an accelerator, so its blocks were run once more, in a wider one. Its output "
                "and gradients are right. What the model itself made in this pass of an x between two of the blocks (the "
                "loss of an auxiliary head, say) is of the first run.",
            )

    def _recurrence(self, gamma: Any) -> Recurrence:
        return recurrence_of(gamma, self.steps, self.settings.form, self.range.narrow)
