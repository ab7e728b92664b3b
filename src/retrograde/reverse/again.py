"""A pass on an accelerator that has left its range is run again, in one that widens.

On a CPU there is a look at the range after every step, and where a value left it, that step is taken again in a wider
one. On an accelerator every look makes the host wait, so there is one, where the pass ends. If a value has left the
range by then, the blocks are run once more from x₀, with a look after every step.

What the first run left behind is undone: random generators and running statistics go back to where they were before
each block. The x's that were handed out between blocks get their new values. A gradient that comes back through the
first run is refused (`left_behind`). A block that cannot be run twice without a trace (it is given a list or a
key-value cache, or writes to a buffer) has a look after its step, and so have all after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import RangeOverflow
from .changes import CONTAINERS, differ
from .extra import Extra, shared
from .parts import Memo, Parts, parts_of, written

if TYPE_CHECKING:
    from .forward import Pass

LAUNCH = "velocity"
"""The name of the block that makes the initial velocity."""
LEFT_BEHIND = (
    "a gradient was asked of an x between two blocks, in a pass that left its range and was run again: the x belongs to the "
    "first run. Run this step again; the range is wide enough now."
)


class Run:
    """One block's first run in a pass, and how things stood before it."""

    def __init__(
        self, block: Any, extra: Extra, name: str, form: str | None, x: Tensor, parts: Parts, statistics: Copied | None
    ) -> None:  # fmt: skip
        self.block = block
        self.extra = extra
        self.name = name
        self.form = form
        self.parts = parts
        self.surroundings = extra.surroundings(x)
        self.places = shared(self.surroundings.places())
        self.statistics = statistics
        self.versions = list(map(written, parts.watched))
        unknown = parts.buffers if parts.writes is None and parts.settled else []
        self.buffers = [(b, b.clone()) for _, own in unknown for b in own.values() if b is not None]
        self.x: Callable[[], Tensor | None] = lambda: None  # what was handed out after its step

    def renew(self, x: Tensor) -> None:
        """Give the x that was handed out its new values, if anybody still has it."""
        old = self.x()
        if old is not None:
            old.data.copy_(x.detach())


class Statistics:
    """Copies of the running statistics of all blocks that are known, made before the first of them runs: a few large copies."""

    def __init__(self) -> None:
        self.copies: dict[Parts, Copied] = {}

    def of(self, parts: Parts, memo: Memo | None) -> Copied | None:
        """Those of a block as they are now."""
        if not parts.running_statistics:
            return None
        known = self.copies.get(parts)
        if known is None or known.versions is None or known.versions != parts.written():  # new, or shared with another
            self._copy([parts] if self.copies or memo is None else list({*memo.values(), parts}))
        return self.copies[parts]

    def _copy(self, blocks: list[Parts]) -> None:
        groups: dict[tuple[torch.dtype, torch.device, bool], Group] = {}
        for parts in blocks:
            copied = self.copies[parts] = Copied(parts.running_statistics, parts.written(), [])
            for t in parts.running_statistics:
                group = groups.setdefault((t.dtype, t.device, t.dim() > 0), Group())
                copied.places.append((group, group.size))
                group.tensors.append(t if t.dim() < 2 else t.flatten())
                group.size += t.numel()
        with torch.no_grad():
            for group in groups.values():
                group.copy = torch.cat(group.tensors) if group.tensors[0].dim() else torch.stack(group.tensors)
                group.tensors.clear()


class Group:
    """Running statistics that are copied at once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.size = 0
        self.copy: Any = None


class Copied(NamedTuple):
    """Running statistics of a block, how often they had been written to, and where the values of then begin."""

    tensors: list[Tensor]
    versions: list[int] | None
    places: list[tuple[Group, int]]

    def put_back(self) -> None:
        with torch.no_grad():
            for t, (group, at) in zip(self.tensors, self.places, strict=True):
                t.copy_(group.copy[at : at + t.numel()].view_as(t))


class Again:
    """The runs of a pass so far, which begins with x₀."""

    def __init__(self, x0: Tensor) -> None:
        self.x0 = x0
        self.runs: list[Run] = []
        self.statistics = Statistics()

    def note(
        self, block: Any, extra: Extra, name: str, form: str | None, x: Tensor, parts: Parts, memo: Memo | None
    ) -> bool:  # fmt: skip
        """Note what is to be run on x; False if it cannot be run twice."""
        if extra.contains or parts.holds or parts.writes or any(map(_moves, (*extra.args, *extra.kwargs.values()))):
            return False
        self.runs.append(Run(block, extra, name, form, x, parts, self.statistics.of(parts, memo)))
        return True

    def ran(self, run: Pass) -> None:
        """The block that was noted last has run, and its step is taken."""
        last = self.runs[-1]
        last.x = weakref.ref(run.x)
        last.parts.writes = (
            list(map(written, last.parts.watched)) != last.versions
            or last.parts.replaced()
            or bool(last.parts.moving)
            or any(differ(b, before) for b, before in last.buffers)  # written to in a way that is not counted
        )
        last.buffers = []
        if last.parts.writes:  # to a parameter, or to a buffer that is no running statistic
            run.look_back(repeatable=False)

    def put_back(self) -> None:
        """Let running statistics stand as they did at the start. Random generators are put where they were block by block."""
        for run in reversed(self.runs):  # the first of those of one block is the last to be put back
            if run.statistics is not None:
                run.statistics.put_back()

    def __iter__(self) -> Iterator[Run]:
        """The runs in their order, each after its generators were put where they were; after the last one, where they are now."""
        if not self.runs:
            return
        surroundings = self.runs[-1].surroundings
        now = surroundings.places()
        try:
            for run in self.runs:
                run.surroundings.put(run.places)
                yield run
        finally:
            surroundings.put(now)


def _moves(value: Any) -> bool:
    """Whether a block may change an extra input: a container, a key-value cache, an object of the user's own."""
    kind = type(value)
    if kind in CONTAINERS:
        return True
    return hasattr(value, "__dict__") and not callable(value) and not kind.__module__.startswith("torch.")


def collective(parts: Parts) -> bool:
    """Whether running a block takes part in a collective, which one process must not do alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    sharded = any(type(p).__name__ == "DTensor" or hasattr(p, "_spec") for p in parts.parameters)
    kinds = {cls.__name__ for m in parts.modules for cls in type(m).__mro__}
    return sharded or bool(kinds & {"FSDPModule", "FullyShardedDataParallel", "SyncBatchNorm"})


def note_run(run: Pass, block: Any, extra: Extra, name: str, form: str | None) -> None:
    """Note what a pass is about to run, in order to run it again; or else let it look after every step from now on."""
    assert run.again is not None
    parts = parts_of(block, name, run.memo)
    if collective(parts):
        run.again = None  # other processes would wait: what the values were is told later
    elif not run.again.note(block, extra, name, form, run.x, parts, run.memo):
        run.look_back()


def look_back(run: Pass, repeatable: bool) -> None:
    """Look at the range of a pass so far; from now on, look after every step.

    If a value has left the range, the blocks are run again from x₀, in a range that widens.
    """
    assert run.again is not None
    again, run.again = run.again, None
    state = run.tape.state
    if state.range.look_back(state.range.table[: run.k + 1].tolist()):
        return
    if not repeatable:
        state.range.refuse(0, run.k + 1)
        return
    left_behind(state.gradient)
    again.put_back()
    run.ran_again = True
    run.begin(state.anew(again.x0, state.range.restart(again.x0)), again.x0)
    for each in again:
        if each.name == LAUNCH:
            run.launch(each.block, each.extra, each.form)
        else:
            each.renew(run.step(each.block, each.extra, each.name, each.form))


def left_behind(gradient: Any) -> None:
    """Refuse gradients that come back through the first run."""

    def refuse(*_: Any) -> NoReturn:
        raise RangeOverflow(LEFT_BEHIND)

    gradient.vjp = gradient.enter = gradient.leave = refuse
