"""The plans of a network's stacks of blocks within a budget.

A `MomentumNet` is one stack, a converted model has one for each stage. Before the first training step with an input of a new
kind, the step is run on a copy without values (`fake`), every stack keeping as little as it can, and the most memory of each
interval is noted. From that follows what each stack may keep (`schedule`). If there are several stacks, the plan is then tried in
the same way, and exchanged for a leaner one if it takes more than it should.

Some networks cannot run without values: kernels that PyTorch does not know, sharded parameters, masks that are looked at. Then
the first real step keeps as little as it can and is observed, and the plan for the later ones is estimated from it.

The loss is not known to the network. For a converted model it is taken to need twice the model's output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .fake import Copy, Meter, attention_on, device_of, fake_copy, is_fake, plain, run_step
from .modes import Budget, MemoryPlan, Stack, holding
from .schedule import Choice, Saved, Track, chain, estimated, with_reserve, within
from .step import bytes_of, mean_of_squares

KINDS = 64
"""Kinds of input whose plans are remembered."""
TRIES = 4
"""Plans that are tried before the leanest is taken."""


class Observer:
    """What one pass through a stack is shown to."""

    def __init__(self, recorder: Recorder, name: str, track: Track) -> None:
        self.recorder = recorder
        self.name = name
        self.track = track

    def watch(self, k: int, block: Any) -> Any:
        """The block to run as block k, which notes when it runs (k = −1: it makes the initial velocity)."""
        if k >= 0:
            self.recorder.order.append((self.name, k))
            self.recorder.outside.append(0)
        return block if self.recorder.meter is None else _Watched(block, k, self.track, self.recorder)

    def look(self, k: int) -> Saved:
        """Block k is about to run; to be shown what it would store."""
        return self.track.note(k, self.recorder.meter)


@dataclass
class _Watched:
    """A block of a copy without values. It begins an interval when it first runs and when its gradient comes."""

    block: Any
    k: int
    track: Track
    recorder: Recorder

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        k, track, meter = self.k, self.track, self.recorder.meter
        assert meter is not None
        with attention_on(x.device.type):
            if k in track.forward:
                return self.block(x, *args, **kwargs)
            track.forward[k], drawn = meter.mark(), meter.drawn
            y = self.block(x, *args, **kwargs)
        begins = self.recorder.begins and k >= 0
        if x.device.type == "cpu" and (meter.drawn > drawn or begins):
            track.generators[k] = len(torch.default_generator.get_state())
            self.recorder.begins &= not begins
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(lambda _: track.backward.__setitem__(k, meter.mark()))
        return y

    def modules(self) -> Iterator[nn.Module]:
        return self.block.modules() if hasattr(self.block, "modules") else iter(())  # a velocity may be a function


class Recorder:
    """The tracks of the stacks in one observed step.

    Args:
        meter: of a copy without values; None: a real step is observed, of which only the forward pass is seen.
        known: the tensors that exist anyway.
    """

    def __init__(self, meter: Meter | None, known: Sequence[Tensor]) -> None:
        self.meter = meter
        self.known = {t.untyped_storage()._cdata for t in known}
        self.tracks: dict[str, Track] = {}
        self.elements: Counter[str] = Counter()  # of x, by stack, over all of its passes
        self.order: list[tuple[str, int]] = []  # the blocks as they ran
        self.outside = [0]  # of a real step: bytes that autograd saved before each block, and after the last
        self.begins = True  # the first block keeps the state of the random generator, drawn from or not

    def observer(self, stack: Stack, x: Tensor, training: bool = True) -> Observer:
        """For a pass of this stack that is given x."""
        self.elements[stack.name] += x.numel()
        if stack.name not in self.tracks:
            recurrence = stack.recurrence if training else stack.recurrence.in_evaluation
            self.tracks[stack.name] = Track.of(stack.plan_for(x.dtype, training), recurrence, x, self.known)
        return Observer(self, stack.name, self.tracks[stack.name])

    def done(self) -> None:
        """The step of the last block has been taken. What follows may not be the next block."""
        if self.meter is not None:
            self.meter.mark()

    @property
    def once(self) -> dict[str, Track]:
        """The tracks of stacks that ran once. What others keep is of several passes."""
        return {name: t for name, t in self.tracks.items() if self.order.count((name, 0)) == 1}

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a real forward pass: see what autograd saves outside the stacks."""

        def pack(t: Tensor) -> Tensor:
            if t.layout == torch.strided and t.untyped_storage()._cdata not in self.known:
                self.known.add(t.untyped_storage()._cdata)
                self.outside[-1] += t.untyped_storage().nbytes()
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            yield

    def estimate(self, model: nn.Module) -> Step | None:
        """The leanest step, from a real one. None if that did not run all blocks."""
        if not self.once or not all(track.seen for track in self.once.values()):
            return None
        largest = max((bytes_of([p]) for p in model.parameters()), default=0)
        usage = estimated([(self.tracks[name], k) for name, k in self.order], largest, self.outside)
        return Step(usage, self.once)


@dataclass
class Step:
    """An observed step: most bytes by interval, the tracks of stacks that may keep more, peak and held bytes, elements by stack."""

    usage: list[int]
    tracks: dict[str, Track]
    peak: int = 0
    held: int = 0
    elements: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def links(self) -> list[Choice]:
        """The chain of plans that follow from it, if it is the leanest."""
        return chain(self.usage, list(self.tracks.values()))

    def named(self, choice: Choice) -> dict[str, MemoryPlan]:
        """The plans of a choice, by stack."""
        return dict(zip(self.tracks, choice.annotated, strict=True))


def observe(
    fake: Copy, stacks: Sequence[Stack], plans: Mapping[str, MemoryPlan] | None = None,
    loss: Callable[[Any], Tensor] | None = None, autocast: torch.dtype | None = None, outputs: int = 0,
) -> Step:  # fmt: skip
    """Run a training step of a copy without values.

    Args:
        stacks: those of the copy.
        plans: of stacks, by name, that are to keep this instead of as little as they can.
        loss: None if it is not known; it takes `outputs` times the size of the output then.
        autocast: None: as it is set.
    """
    recorder = Recorder(fake.meter, fake.known)
    for stack in stacks:
        stack.planned = (plans or {}).get(stack.name)
        stack.recorder = recorder
    held, output, backward = run_step(fake, loss or mean_of_squares, autocast)
    usage, peak = list(fake.meter.usage), fake.meter.peak
    if loss is None:
        for i in (backward - 1, backward):
            usage[i] += outputs * output
    tracks = {name: track for name, track in recorder.once.items() if track.complete}
    for track in tracks.values():
        track.more = {k: fake.meter.stored[i] - fake.meter.usage[i] for k, i in track.forward.items()}
        for k, n in track.generators.items():
            usage[track.forward[k] :] = [u + n for u in usage[track.forward[k] :]]
    return Step(usage, tracks, peak, held, recorder.elements)


def choose(
    tried: Callable[[Mapping[str, MemoryPlan]], Step], lean: Step, budget: Budget, device: torch.device
) -> dict[str, MemoryPlan]:
    """The quickest plans within the budget, by stack.

    Args:
        tried: a step with these plans, without values.
        lean: the leanest step.

    Raises:
        Overdrawn: if no plan fits.
    """
    most = budget.bytes(device)
    choice = within(most, lean.links, repr(budget.given))
    leanest = min(lean.links, key=lambda link: link.peak)
    more = 0  # bytes that a plan took more than was thought
    for _ in range(TRIES):
        peak = choice.peak if choice is lean.links[0] else max(tried(lean.named(choice)).usage)
        if with_reserve(peak) <= most:
            return lean.named(replace(choice, peak=max(peak, choice.peak)))
        more = max(more, peak - choice.peak)
        fitting = [link for link in lean.links if with_reserve(link.peak + more) <= most]
        choice = fitting[-1] if fitting else leanest
    return lean.named(leanest)


@dataclass
class _Known:
    """What is known of one kind of input."""

    lean: Step | None = None  # the leanest step
    recorder: Recorder | None = None  # of a real step, if the copy could not run
    plans: dict[int, dict[str, MemoryPlan]] = field(default_factory=dict)  # by budget in bytes


class Scheduler:
    """The plans of one network within its budget, by kind of input. Copies and pickles of it start anew.

    Args:
        outputs: how many times the size of the output the loss takes, which is not known.
    """

    def __init__(self, budget: Budget | None, outputs: int = 0) -> None:
        self.budget = budget
        self.outputs = outputs
        self.known: dict[Hashable, _Known] = {}

    def schedule(
        self, model: nn.Module, stacks: Sequence[Stack], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Recorder | None:
        """Give each stack its plan for this step. Returns the recorder if this step is observed."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if self.budget is None or any(map(is_fake, inputs)):  # no budget, or this is the copy
            return None
        for stack in stacks:
            stack.planned = stack.recorder = None
        if not torch.is_grad_enabled():
            return None
        kind = _kind(model, stacks, inputs)
        if kind not in self.known:
            while len(self.known) >= KINDS:
                self.known.pop(next(iter(self.known)))
            self.known[kind] = _Known()
        known, tensors = self.known[kind], [*model.parameters(), *model.buffers(), *inputs]
        if known.lean is None and known.recorder is None and plain(tensors):
            with suppress(Exception):  # whatever is wrong with the model itself shows in the real step
                known.lean = self.step(model, stacks, args, kwargs)
        if known.lean is None:
            known.lean = None if known.recorder is None else known.recorder.estimate(model)
        if known.lean is None:
            known.recorder = Recorder(None, tensors)
            for stack in stacks:
                stack.recorder = known.recorder
            return known.recorder
        device = device_of(model)
        budget = self.budget.bytes(device)
        if budget not in known.plans:
            known.plans.clear()  # a budget that follows what is free differs from step to step
            if known.recorder is not None or len(known.lean.tracks) < 2:  # cannot be tried, or need not be
                choice = within(budget, known.lean.links, repr(self.budget.given))
                known.plans[budget] = known.lean.named(choice)
            else:
                tried = partial(self.step, model, stacks, args, kwargs)
                known.plans[budget] = choose(tried, known.lean, self.budget, device)
        for stack in stacks:
            stack.planned = known.plans[budget].get(stack.name)
        return None

    def step(
        self, model: nn.Module, stacks: Sequence[Stack], args: Any, kwargs: Any, plans: Mapping[str, MemoryPlan] | None = None
    ) -> Step:  # fmt: skip
        """A step with these plans, on a copy without values."""
        with fake_copy(model, args, kwargs, list(stacks)) as fake:
            return observe(fake, fake.others, plans, outputs=self.outputs)

    def __reduce__(self) -> Any:
        return Scheduler, (self.budget, self.outputs)


def _kind(model: nn.Module, stacks: Sequence[Stack], inputs: Sequence[Tensor]) -> Hashable:
    """What decides which tensors a step keeps."""
    device = device_of(model).type
    given = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in inputs)
    parameters = [(0 if is_lazy(p) else p.numel(), p.requires_grad) for p in model.parameters()]
    sizes = (sum(n for n, _ in parameters), sum(trained for _, trained in parameters))
    cast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
    held = tuple((*holding(s.recurrence, torch.float32).items(), s.kind) for s in stacks)  # γ may move
    return given, model.training, sizes, cast, held
