"""The memory of a training step, interval by interval, and what may be kept in it.

    intervals   forward of block 0, 1, …, K−1 of each stack, what follows, backward of block K−1, …, 1, 0
    usage       the most bytes alive in each, seen in a step in which every stack keeps as little as it can
    a block     that keeps its input, or its tensors, adds their bytes to the intervals between its forward and its backward;
                to those two themselves it adds nothing: there the tensors are in any plan (but integers that are kept stand
                beside the float that they are decoded to)

From the leanest plan on, one block after another is given more: that which raises the highest point least for the time that
it saves. So the plans of all budgets are one chain, each keeps what the one before it keeps, and more memory is never
slower. The first links are free: in a network whose stacks are of different sizes the highest point is in one of them, and
what the others keep meanwhile does not raise it.

Time is counted in bytes of traffic. Measured on an H200: a step back moves 28–36 bytes per element of x, and a block that is run
again takes the time of 3–5 bytes for each byte that it saves (ResNet bottlenecks; a transformer's layer is nearer to 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core.fixedpoint import integer_dtype
from ..core.tape import Frame
from .momentum import Recurrence
from .planner import Plan, holding, input_bytes

STEP = 8.0
"""Traffic of a step back, per byte of x as an integer."""
REPLAY = 4.0
"""Traffic of running a block again, per byte that it saves."""
EARLY = 0.75
"""How much of that is left where the input is kept and the output is not wanted: nothing after the last tensor saved is run."""
RESERVE, LARGE = 0.05, (0.01, 2**28)
"""For what no tensor shows (workspaces of kernels, what the allocator rounds up): a share of the peak; of a large one a smaller share
and a workspace. Measured on an H200 (`benchmarks/predict.py`): to 0.2 GB for convolutions, 1 % for the rest."""

_END = 2**62


@dataclass
class Track:
    """One stack in a step: in which intervals its blocks run, and what they would keep.

    Attributes:
        plan: of the step that was seen: every block the same way.
        input: bytes of a block's input.
        kept: bytes of it where it is kept: fewer than `input` if that is as integers.
        unit: bytes of x as integers.
        state: bytes that reversed blocks keep together.
        mask: bytes that a step keeps in any plan.
        known: addresses of memory that is there anyway: parameters, buffers, extra inputs.
        saved: by block, bytes that it would keep.
        largest: by block, bytes of the largest tensor among them.
        whole: by block, whether its output is among them.
        places: by block, bytes of where random generators stood, kept in order to run it again.
        forward, backward: by block, the interval.
    """

    plan: Plan
    input: int
    kept: int
    unit: int
    state: int
    mask: int = 0
    known: set[int] = field(default_factory=set)
    saved: dict[int, int] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=dict)
    whole: dict[int, bool] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, recurrence: Recurrence, x: Tensor, known: Iterable[Tensor] = ()) -> Track:
        size = x.numel()
        state = size * holding(recurrence, x.dtype).get("reverse", 0) if plan.reversed else 0
        addresses = {t.untyped_storage()._cdata for t in known}
        unit = size * integer_dtype(x.dtype, recurrence.narrow).itemsize
        mask = -(-size // 8) if recurrence.form == "relu" and any(recurrence.gammas) else 0
        kept = size * input_bytes(recurrence, x.dtype)
        return cls(plan, size * x.dtype.itemsize, kept, unit, state, mask, addresses)

    def look(self, k: int, frame: Frame, tensors: Sequence[Tensor]) -> None:
        """See what block k would keep (k = −1: what makes the initial velocity)."""
        dense = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
        storages = {s._cdata: s.nbytes() for s in dense}
        sizes = [n for address, n in storages.items() if address not in self.known]
        self.saved[k], self.largest[k], self.whole[k] = sum(sizes), max(sizes, default=0), frame.ends_saved

    def placed(self, usage: list[int]) -> list[int]:
        """The usage with the places of random generators, which every block keeps in the leanest plan."""
        for k, n in self.places.items():
            usage[self.forward[k] :] = [u + n for u in usage[self.forward[k] :]]
        return usage

    @property
    def complete(self) -> bool:
        """Whether each block was seen, and those with a gradient in backward."""
        blocks = range(self.plan.depth)
        return all(k in self.forward and k in self.saved for k in blocks) and all(
            k in self.backward for k in blocks if self.saved[k]
        )

    @property
    def lowest(self) -> int:
        """The first block that has anything to run again for."""
        return next((k for k in range(self.plan.depth) if self.saved[k]), self.plan.depth)

    def held(self, k: int, plan: Plan) -> int:
        """Bytes that block k keeps."""
        if k >= plan.replayed or not self.saved[k]:
            return self.saved[k]
        return self.kept if k >= plan.reversed else 0

    def beside(self, k: int, plan: Plan) -> int:
        """Bytes of integers that block k keeps beside its input, while it runs and while it is run again."""
        replayed = plan.reversed <= k < plan.replayed and self.saved[k]
        return self.kept if replayed and self.kept < self.input else 0

    def cost(self, k: int, plan: Plan) -> float:
        """Traffic of running block k again."""
        if k >= plan.replayed or k < self.lowest:
            return 0.0
        if k < plan.reversed:
            return STEP * self.unit + REPLAY * self.saved[k]
        beside = self.beside(k, plan)
        decoding = 3 * beside + self.input if beside else 0  # a copy of the integers, then a float of them
        return decoding + REPLAY * self.saved[k] * (1.0 if self.whole[k] else EARLY)

    def moves(self, plan: Plan) -> Iterator[tuple[Plan, range]]:
        """Plans that keep more of one block, and the blocks that this changes."""
        low, r, c = self.lowest, plan.reversed, plan.replayed
        if r > low:
            yield self._at(r - 1, c), range(r - 1, r)
        if c > low:
            yield self._at(min(r, c - 1), c - 1), range(c - 1, c)

    def _at(self, r: int, c: int) -> Plan:
        r = 0 if r <= self.lowest else r  # what is below it needs no state
        return Plan(r, c - r if c > self.lowest else 0, self.plan.depth - c if c > self.lowest else self.plan.depth)

    def changes(self, old: Plan, new: Plan, blocks: range) -> Iterator[tuple[int, int, int]]:
        """Which intervals need how many bytes more."""
        for k in blocks:
            back = self.backward.get(k, 0)
            yield self.forward[k] + 1, back, self.held(k, new) - self.held(k, old)
            beside = self.beside(k, new) - self.beside(k, old)
            if self.plan.reversed:  # else what was seen has it, at the highest point of forward or elsewhere
                yield self.forward[k], self.forward[k] + 1, beside
            if (
                not self.plan.reversed or k == self.lowest
            ):  # else a reversed block has its output there, which is no smaller
                yield back, back + 1, beside
            if k >= new.replayed:
                yield self.forward[k], _END, -self.places.get(k, 0)
        for plan, sign in ((old, -1), (new, 1)):
            last, first = self.forward[self.plan.depth - 1], plan.reversed
            if -1 in self.saved and not first:
                yield self.forward[0], _END, sign * (self.kept if plan.kept else self.saved[-1])
            if 0 < first < self.plan.depth:  # the rest of the forward pass has a state of its own
                yield self.forward[first], last + 1, sign * self.state
            elif not first and self.plan.reversed:
                yield last + 1, self.backward.get(self.lowest, 0), -sign * self.state


@dataclass(frozen=True)
class Choice:
    """A plan for every stack, the highest point of the step, and the time spent on running blocks again."""

    plans: tuple[Plan, ...]
    peak: int
    cost: float


def chain(usage: Sequence[int], tracks: Sequence[Track], most: int | None = None) -> list[Choice]:
    """Plans from the leanest to the one that keeps everything, each keeping more than the one before it and taking less time.

    Args:
        usage: bytes by interval, when the tracks were seen.
        most: stop where every next one would be above it.
    """
    now = torch.tensor(usage, dtype=torch.int64)
    plans = [track.plan for track in tracks]
    cost = sum(track.cost(k, track.plan) for track in tracks for k in range(track.plan.depth))
    links = [Choice(tuple(plans), int(now.max()), cost)]
    while True:
        best: tuple[float, float, int, Plan, Tensor, int, float] | None = None
        peak = links[-1].peak
        for t, track in enumerate(tracks):
            for plan, blocks in track.moves(plans[t]):
                then = now.clone()
                for start, end, n in track.changes(plans[t], plan, blocks):
                    if end > start:
                        then[start:end] += n
                added = sum(track.held(k, plan) - track.held(k, plans[t]) for k in blocks)
                gain = sum(track.cost(k, plans[t]) - track.cost(k, plan) for k in blocks)
                height = int(then.max())
                if most is not None and height > most:
                    continue
                rise = gain / (height - peak) if height > peak else float("inf")
                if best is None or (rise, gain / max(added, 1)) > best[:2]:
                    best = rise, gain / max(added, 1), t, plan, then, height, gain
        if best is None:
            return links
        _, _, t, plan, now, height, gain = best
        plans[t], cost = plan, cost - gain
        links.append(Choice(tuple(plans), height, max(cost, 0.0)))


def with_reserve(bytes_: int) -> int:
    share, workspace = LARGE
    return bytes_ + int(min(RESERVE * bytes_, share * bytes_ + workspace))


class Overdrawn(ValueError):
    """A budget that nothing fits in."""


def within(budget: int, links: Sequence[Choice], given: str) -> Choice:
    """The quickest of the chain within the budget.

    Raises:
        Overdrawn: if none is.
    """
    fitting = [link for link in links if with_reserve(link.peak) <= budget]
    if fitting:
        return fitting[-1]
    least = with_reserve(min(link.peak for link in links))
    raise Overdrawn(
        f"budget = {budget} bytes is not enough for {given}: the least that a training step takes, above parameters, gradients "
        f"and batch, is {least}. Give that or more, a smaller batch, or budget=None."
    )


def free(usage: Sequence[int], tracks: Sequence[Track]) -> list[Choice]:
    """Those of the chain that are no higher than the leanest."""
    peak = max(usage)
    return chain([min(with_reserve(n), peak) for n in usage], tracks, most=peak)


def planned(choice: Choice) -> tuple[Plan, ...]:
    """The plans, with the figures of the whole."""
    return tuple(replace(plan, peak=with_reserve(choice.peak), cost=choice.cost) for plan in choice.plans)


def estimated(track: Track, gradients: int) -> list[int]:
    """The usage of a stack alone, where nothing but what its blocks keep has been seen.

    Backward of a block has at hand its tensors, the gradients of at most two of the largest, and those of x and v.

    Args:
        gradients: bytes of the largest parameter.
    """
    depth, state, unit = track.plan.depth, track.state, max(track.unit, track.input)
    beside = track.plan.kept > 0 and track.kept < track.input  # the integers of the block itself
    held = [track.kept * (track.plan.kept > 0) * (k + beside) + track.mask * (k + 1) for k in range(depth)]
    track.forward = {k: k for k in range(depth)}
    track.backward = {k: 2 * depth - k for k in range(depth)}
    alone = [track.saved[k] + 2 * track.largest[k] + gradients + 4 * unit for k in range(depth)]
    ahead = [2 * track.unit + state + held[k] + track.saved[k] + 2 * unit for k in range(depth)]
    back = [state + held[k] + alone[k] for k in reversed(range(depth))]
    return [*ahead, state + held[-1] + 3 * unit, *back]
