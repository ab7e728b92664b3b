"""The memory of a training step, interval by interval, and what blocks may keep in it.

    intervals   forward of block 0, 1, …, K−1 of each stack, what follows, backward of block K−1, …, 1, 0
    usage       the most bytes alive in each interval, observed in a step in which every stack keeps as little as it can
    a block     that keeps its input or its tensors adds their bytes to the intervals between its forward and its backward. To
                the latter it adds nothing: there the tensors exist in any plan. (Integers that are kept are an exception: they
                exist beside the float that they are decoded to.) To the former it adds what would have been freed in between

The plans for all budgets are one chain. It starts at the leanest plan. Each link gives one block more to keep: the block that
raises the highest point least for the time it saves. So each plan keeps what the one before it keeps, and more memory is
never slower.

Time is counted in bytes of traffic. Measured on an H200: a step back moves 28–36 bytes per element of x, and running a block
again takes the time of 3–5 bytes for each byte that it saves (ResNet bottlenecks; a transformer's layer is nearer to 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from ..arithmetic.fixed import integer_dtype
from ..reverse.recurrence import Recurrence
from .modes import MemoryPlan, holding, input_bytes

if TYPE_CHECKING:
    from .fake import Meter

STEP = 8.0
"""Traffic of a step back, per byte of x as an integer."""
REPLAY = 4.0
"""Traffic of running a block again, per byte that it saves."""
EARLY = 0.75
"""The share of that traffic that is left when the block's output is not wanted: nothing after its last saved tensor is run."""
RESERVE, LARGE = 0.05, (0.01, 2**28)
"""The reserve for what no tensor shows, workspaces of kernels and rounding by the allocator: a share of the peak; of a large peak
a smaller share and a workspace. Measured on an H200 (`benchmarks/predict.py`): up to 0.2 GB for convolutions, 1 % for the rest."""

_END = 2**62


class Overdrawn(ValueError):
    """A budget that no plan fits in."""


@dataclass
class Track:
    """One stack of blocks in an observed step: what its blocks would keep, and in which intervals they ran.

    Attributes:
        lean: the plan of that step: every block the same way.
        input: bytes of a block's input as a float; `kept`: bytes of it when it is kept, fewer than `input` if as integers.
        unit: bytes of x as integers; `state`: bytes that the reversed blocks keep together; `mask`: bytes a step keeps in any plan.
        known: addresses of memory that is there anyway: parameters, buffers, inputs.
        saved: by block, bytes that it would store; `largest`: bytes of its largest tensor; `ends`: whether its output is stored.
        generators: by block, bytes of states of random generators, kept in order to run it again.
        more: by block, bytes that its forward takes more at the highest point if nothing that it saves is freed.
        references: by block, weak ones to what it saved, which tell when it is freed.
        forward, backward: by block, the interval in which it ran.
    """

    lean: MemoryPlan
    input: int
    kept: int
    unit: int
    state: int
    mask: int = 0
    known: set[int] = field(default_factory=set)
    saved: dict[int, int] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=dict)
    ends: dict[int, bool] = field(default_factory=dict)
    generators: dict[int, int] = field(default_factory=dict)
    more: dict[int, int] = field(default_factory=dict)
    references: dict[int, list[Any]] = field(default_factory=dict, repr=False)
    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, lean: MemoryPlan, recurrence: Recurrence, x: Tensor, known: Iterable[int] = ()) -> Track:
        size = x.numel()
        return cls(
            lean,
            input=size * x.dtype.itemsize,
            kept=size * input_bytes(recurrence, x.dtype),
            unit=size * integer_dtype(x.dtype, recurrence.narrow).itemsize,
            state=size * holding(recurrence, x.dtype).get("reverse", 0) if lean.reversed else 0,
            mask=-(-size // 8) if recurrence.form == "relu" and any(recurrence.gammas) else 0,
            known=set(known),
        )

    def note(self, k: int, meter: Meter | None = None) -> Saved:
        """To be shown what block k would store (k = −1: the block that makes the initial velocity)."""
        return Saved(self, k, meter)

    @property
    def seen(self) -> bool:
        """Whether every block was observed in forward."""
        return all(k in self.saved for k in range(self.lean.depth))

    @property
    def complete(self) -> bool:
        """Whether every block was observed in forward, and in backward if it has a gradient."""
        return self.seen and all(
            k in self.forward and (k in self.backward or not self.saved[k]) for k in range(self.lean.depth)
        )

    @property
    def lowest(self) -> int:
        """The first block that has anything to run again for."""
        return next((k for k in range(self.lean.depth) if self.saved[k]), self.lean.depth)

    def held(self, k: int, plan: MemoryPlan) -> int:
        """Bytes that block k keeps."""
        if k >= plan.replayed or not self.saved[k]:
            return self.saved[k]
        return self.kept if k >= plan.reversed else 0

    def beside(self, k: int, plan: MemoryPlan) -> int:
        """Bytes of integers that block k keeps beside its float input, while it runs and while it is run again."""
        keeps_input = plan.reversed <= k < plan.replayed and self.saved[k]
        return self.kept if keeps_input and self.kept < self.input else 0

    def cost(self, k: int, plan: MemoryPlan) -> float:
        """Traffic of running block k again."""
        if k >= plan.replayed or k < self.lowest:
            return 0.0
        if k < plan.reversed:
            return STEP * self.unit + REPLAY * self.saved[k]
        beside = self.beside(k, plan)
        decoding = 3 * beside + self.input if beside else 0  # a copy of the integers, then a float of them
        return decoding + REPLAY * self.saved[k] * (1.0 if self.ends[k] else EARLY)

    @property
    def work(self) -> tuple[float, float]:
        """Traffic of a plain step through these blocks, and of running them again as the plan says.

        Backward takes twice the time of forward. In form "relu" a step forms the sum and the relu: five passes over x less.
        """
        again = range(self.lowest, self.lean.replayed)
        steps = max(self.lean.reversed - self.lowest, 0)
        back = STEP * self.unit - (5 * self.input if self.mask else 0)
        return 3 * REPLAY * sum(self.saved.values()), REPLAY * sum(self.saved[k] for k in again) + back * steps

    def moves(self, plan: MemoryPlan) -> Iterator[tuple[MemoryPlan, int]]:
        """Plans in which one block keeps more, and that block: the last reversed or the last replayed one."""
        reversed_, replayed = plan.reversed, plan.replayed
        if reversed_ > self.lowest:
            yield self._plan(reversed_ - 1, replayed), reversed_ - 1
        if replayed > self.lowest:
            yield self._plan(min(reversed_, replayed - 1), replayed - 1), replayed - 1

    def _plan(self, reversed_: int, replayed: int) -> MemoryPlan:
        reversed_ = 0 if reversed_ <= self.lowest else reversed_  # what is below the lowest needs no state
        replayed = 0 if replayed <= self.lowest else replayed
        return MemoryPlan(reversed_, replayed - reversed_, self.lean.depth - replayed)

    def changes(self, old: MemoryPlan, new: MemoryPlan, k: int) -> Iterator[tuple[int, int, int]]:
        """From which interval to which a step needs how many bytes more, when block k changes between these plans."""
        start, back = self.forward[k], self.backward.get(k, 0)
        yield start + 1, back, self.held(k, new) - self.held(k, old)
        beside = self.beside(k, new) - self.beside(k, old)
        if self.lean.reversed:  # otherwise the observed step had the integers too
            yield start, start + 1, beside
        if (
            not self.lean.reversed or k == self.lowest
        ):  # otherwise a reversed block had its output there, which is no smaller
            yield back, back + 1, beside
        if k >= new.replayed:
            yield start, start + 1, self.more.get(k, 0)
            yield start, _END, -self.generators.get(k, 0)
        for plan, sign in ((old, -1), (new, 1)):
            last, first = self.forward[self.lean.depth - 1], plan.reversed
            if -1 in self.saved and not first:
                yield self.forward[0], _END, sign * (self.kept if plan.kept else self.saved[-1])
                yield self.forward[-1], self.forward[0], 0 if plan.kept else sign * self.more.get(-1, 0)
            if 0 < first < self.lean.depth:  # the rest of the forward pass has a state of its own
                yield self.forward[first], last + 1, sign * self.state
            elif not first and self.lean.reversed:
                yield last + 1, self.backward.get(self.lowest, 0), -sign * self.state


class Saved:
    """What one block would store. It is shown one tensor after another, and keeps none."""

    def __init__(self, track: Track, k: int, meter: Meter | None) -> None:
        self.track = track
        self.k = k
        self.meter = meter
        self.sizes: list[int] = []
        self.seen: dict[int, Any] = {}
        track.references[k] = []

    def add(self, t: Tensor) -> None:
        if t.layout != torch.strided:
            return
        storage = t.untyped_storage()
        at = storage._cdata
        before = self.seen.get(at)  # another one may have come in the place of one that was freed
        if at in self.track.known or (before is not None and before() is storage):
            return
        size = storage.nbytes()
        self.seen[at] = ref(storage, None if self.meter is None else self.meter.saved(size))
        self.track.references[self.k].append(self.seen[at])
        self.sizes.append(size)

    def end(self, ends: bool) -> None:
        """The block has run; whether its output is stored."""
        track, k = self.track, self.k
        track.saved[k], track.largest[k], track.ends[k] = sum(self.sizes), max(self.sizes, default=0), ends


@dataclass(frozen=True)
class Choice:
    """A plan for every stack, the highest point of the step, and the time spent on running blocks again."""

    plans: tuple[MemoryPlan, ...]
    peak: int
    cost: float

    @property
    def annotated(self) -> list[MemoryPlan]:
        """The plans, each with the figures of the whole step."""
        return [replace(plan, peak=with_reserve(self.peak), cost=self.cost) for plan in self.plans]


def chain(usage: Sequence[int], tracks: Sequence[Track]) -> list[Choice]:
    """Plans from the leanest to the one that keeps everything. Each keeps more than the one before it and takes less time."""
    now = torch.tensor(usage, dtype=torch.int64)
    plans = [track.lean for track in tracks]
    cost = sum(track.cost(k, track.lean) for track in tracks for k in range(track.lean.depth))
    links = [Choice(tuple(plans), int(now.max()), cost)]
    while True:
        best: tuple[float, float] = (-1.0, 0.0)
        step: tuple[int, MemoryPlan, Tensor, float] | None = None
        for t, track in enumerate(tracks):
            for plan, k in track.moves(plans[t]):
                then = now.clone()
                for start, end, n in track.changes(plans[t], plan, k):
                    then[start : max(start, end)] += n
                rise = int(then.max()) - links[-1].peak
                added = track.held(k, plan) - track.held(k, plans[t])
                saved = track.cost(k, plans[t]) - track.cost(k, plan)
                worth = (saved / rise if rise > 0 else float("inf"), saved / max(added, 1))
                if step is None or worth > best:
                    best, step = worth, (t, plan, then, saved)
        if step is None:
            return links
        t, plans[t], now, saved = step
        cost = max(cost - saved, 0.0)
        links.append(Choice(tuple(plans), int(now.max()), cost))


def with_reserve(bytes_: int) -> int:
    share, workspace = LARGE
    return bytes_ + int(min(RESERVE * bytes_, share * bytes_ + workspace))


def within(budget: int, links: Sequence[Choice], given: str) -> Choice:
    """The quickest plan of the chain within the budget.

    Args:
        given: the budget as the user gave it, for the error.

    Raises:
        Overdrawn: if none fits.
    """
    fitting = [link for link in links if with_reserve(link.peak) <= budget]
    if fitting:
        return fitting[-1]
    least = with_reserve(min(link.peak for link in links))
    raise Overdrawn(
        f"memory={given} is not enough for this network and input: the least that a training step takes, above parameters, "
        f"gradients and batch, is {least} bytes. Give that or more, a smaller batch, or memory='auto'."
    )


def estimated(order: Sequence[tuple[Track, int]], gradients: int, outside: Sequence[int] = ()) -> list[int]:
    """The usage of a step of which only the forward pass was observed. The tracks are given their intervals.

    Backward of a block has at hand its tensors, the gradients of at most two of the largest, those of x
    and v, and in 16 bits their sums.

    Args:
        order: the blocks in the order they ran: their stack, and their number in it.
        gradients: bytes of the largest parameter.
        outside: bytes that autograd saved outside the stacks before each block, and after the last one.
    """
    outside = outside or [0] * (len(order) + 1)
    ahead, back = list[int](), list[int]()
    held = unit = 0
    started = set[int]()
    for i, (track, k) in enumerate(order):
        unit = max(track.unit, track.input)
        keeps = track.kept if track.lean.kept else 0
        beside = keeps if track.kept < track.input else 0  # the block's own integers exist beside its float
        held += outside[i] + track.mask + (0 if id(track) in started else track.state)
        started.add(id(track))
        track.forward[k], track.backward[k] = i, 2 * len(order) - i
        ahead.append(held + beside + track.saved[k] + 4 * unit)
        alone = beside + track.saved[k] + 2 * track.largest[k] + 6 * unit
        back.append(held + gradients + max(alone, 2 * outside[i]))
        held += keeps
    keeps_last = keeps - beside if order else 0  # the last block's input is still at hand
    return [*ahead, held - keeps_last + 3 * outside[-1] + 3 * unit, *reversed(back)]
