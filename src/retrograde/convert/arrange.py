"""What the stages of one model keep beyond the least that they can: within a budget for the whole, or in memory that is free anyway.

Before the first training step with an input of a kind, the step is run without values (`measure.dry`), every stage keeping as
little as it can, and the most memory of each interval is noted: forward and backward of every block, and what is in between. From
that follows what each stage may keep (`stack.timeline`):

    with a budget   the quickest plan whose highest point is within it
    "free"          the quickest plan whose highest point is no higher than that of the leanest: stages of other sizes than the
                    one that sets the peak keep inputs and tensors while it is not their turn. A stage alone stays as it is

The plan is then tried in the same way, and exchanged for one that keeps less where it takes more than it should.

The loss is not known to the model: it is taken to need twice the model's output besides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..measure.dry import Meter, attention_of, device_of, dry, plain, unseen
from ..measure.step import mean_of_squares, tensors_of
from ..stack.planner import FREE, Plan, as_bytes, holding
from ..stack.timeline import Choice, Overdrawn, Track, chain, free, planned, with_reserve, within

if TYPE_CHECKING:
    from .stage import Stage

_numbers = count(1)
_KINDS = {True: 64, False: 4}  # of input that are planned for, with and without a budget
_TRIES = 4  # of plans
_STEPS = 256
"""Blocks up to which free memory is looked for: without values a block takes about 20 ms."""


class Recorder:
    """Notes when the blocks of the stages run."""

    def __init__(self, meter: Meter, known: Sequence[Tensor]) -> None:
        self.meter, self.known = meter, known
        self.tracks: dict[Stage, Track] = {}
        self.drawn = 0
        self.twice: set[Stage] = set()  # run more than once in a step: what is kept is of both

    def track(self, stage: Stage, x: Tensor) -> Track:
        """Of a stage that is given x."""
        if stage not in self.tracks:
            self.tracks[stage] = Track.of(stage.plan_for(x.dtype), stage.recurrence, x, self.known)
        return self.tracks[stage]

    def begin(self, stage: Stage, k: int, x: Tensor) -> Track:
        """Block k of the stage is about to run on x."""
        track = self.track(stage, x)
        if k in track.forward:
            self.twice.add(stage)
        track.forward[k], self.drawn = self.meter.mark(), self.meter.drawn
        return track

    def end(self, track: Track, k: int, y: Any) -> None:
        """It has run, and what it led to is y."""
        if not isinstance(y, Tensor):
            return
        if y.device.type == "cpu" and self.meter.drawn > self.drawn:
            track.places[k] = len(torch.default_generator.get_state())
        if y.requires_grad:
            y.register_hook(lambda _: track.backward.__setitem__(k, self.meter.mark()))


def simulated(
    model: nn.Module, stages: Sequence[Stage], args: Sequence[Any], kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None, autocast: torch.dtype | None = None, plans: Mapping[str, Plan] | None = None,
) -> tuple[list[int], dict[Stage, Track]]:  # fmt: skip
    """The usage of a training step in which every stage keeps as little as it can, and the tracks of those that may keep more.

    Args:
        plans: of stages, by name, that are to keep this instead.
        loss: None: not known.
        autocast: None: as it is set.
    """
    device = device_of(model)
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    if autocast is not None:
        dtype, enabled = autocast, True
    cached = enabled and torch.is_autocast_cache_enabled()
    before = [(stage, stage.dry, stage.planned, stage.last) for stage in stages]
    try:
        with unseen(model.modules()), dry(model, (tuple(args), dict(kwargs))) as (meter, (args, kwargs)):
            known = [
                t
                for t in (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs)))
                if isinstance(t, Tensor)
            ]
            recorder = Recorder(meter, known)
            for stage in stages:
                stage.dry, stage.planned, stage.recorder = attention_of(model), (plans or {}).get(stage.name), recorder
            with torch.autocast(device, dtype, enabled=enabled):
                out = model.forward(*args, **kwargs)
                scalar = (loss or mean_of_squares)(out)
            spare = (
                0 if loss else 2 * sum(t.numel() * t.element_size() for t in tensors_of(out) if t.is_floating_point())
            )
            del out
            forward = meter.mark()
            torch.autograd.backward(scalar, inputs=meter.leaves or None)
            usage = meter.usage(cached)
            for i in (forward - 1, forward):
                usage[i] += spare
    finally:
        for stage, around, plan, last in before:
            stage.dry, stage.planned, stage.last, stage.recorder = around, plan, last, None
            stage.open.clear()
    if any(
        stage.settings.verify in ("end", "blocks") for stage in stages
    ):  # gradients are put by, in case they turn out wrong
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        usage[forward:] = [n + gradients for n in usage[forward:]]
    tracks = {
        stage: track for stage, track in recorder.tracks.items() if track.complete and stage not in recorder.twice
    }
    for track in tracks.values():
        usage = track.placed(usage)
    return usage, tracks


def _named(choice: Choice, tracks: Mapping[Stage, Track]) -> dict[str, Plan]:
    return dict(zip((stage.name for stage in tracks), planned(choice), strict=True))


class Arrangement:
    """The plans of a converted model's stages, by kind of input. One for each call of `convert`; the last one has all stages."""

    def __init__(self, budget: Any, auto: bool) -> None:
        self.budget, self.auto = None if budget == FREE else budget, auto and budget is not None
        self.number = next(_numbers)  # by which stages know it: a reference would make a circle
        self.stages: list[Stage] = []
        self.plans: dict[Hashable, dict[str, Plan]] = {}

    def arrange(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Give each stage its plan for this step."""
        mine = [stage for stage in self.stages if stage.arrangement == self.number]
        if not mine or not self.auto or any(stage.dry for stage in mine):
            return
        key = self._kind(model, mine, args, kwargs)
        if key not in self.plans:
            self.plans[key] = self._planned(model, mine, args, kwargs)
        chosen = self.plans[key]
        for stage in mine:
            stage.planned = chosen.get(stage.name)

    def _planned(
        self, model: nn.Module, stages: Sequence[Stage], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Plan]:
        given = self.budget is not None
        if len(self.plans) >= _KINDS[given]:
            if not given:
                return {}
            self.plans.pop(next(iter(self.plans)))
        several = sum(not stage.checkpointed for stage in stages) > 1  # one alone has nobody to keep below
        if not given and (not several or sum(stage.steps for stage in stages) > _STEPS):
            return {}
        try:
            if not plain([*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]):
                raise TypeError("its parameters or inputs are not plain tensors (sharded ones, say)")
            return self.chosen(lambda plans: simulated(model, stages, args, kwargs, plans=plans), model)
        except Overdrawn:
            raise
        except Exception as error:
            if not given:
                return {}  # as little as can be kept, then
            raise ValueError(
                f"budget={self.budget!r}: the model could not be tried out without values, so nothing is known of its memory "
                f"({type(error).__name__}: {error}). Convert it without a budget, or its stages as MomentumNet(budget=...)."
            ) from error

    def chosen(
        self, step: Callable[[Mapping[str, Plan] | None], tuple[list[int], dict[Stage, Track]]], model: nn.Module
    ) -> dict[str, Plan]:
        """The plans of the stages, by name.

        Args:
            step: `simulated`, with these plans.
        """
        usage, tracks = step(None)
        needs: Callable[[int], int]
        if self.budget is None:
            links, most, needs = free(usage, list(tracks.values())), max(usage), int
        else:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            links, most, needs = chain(usage, list(tracks.values())), as_bytes(self.budget, device), with_reserve
            within(most, links, "this model and batch")
        least, more = min(links, key=lambda link: link.peak), 0  # more than was thought
        for _ in range(_TRIES):
            choice = next((link for link in reversed(links) if needs(link.peak + more) <= most), least)
            seen = max(step(_named(choice, tracks))[0]) if choice is not links[0] else choice.peak
            if needs(seen) <= most:
                return _named(replace(choice, peak=max(seen, choice.peak)), tracks)
            more = seen - choice.peak
        return _named(least, tracks)

    @staticmethod
    def _kind(model: nn.Module, stages: Sequence[Stage], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        leaves = tuple(
            (t.shape, t.dtype, t.device, t.requires_grad) if isinstance(t, Tensor) else type(t)
            for t in tree_leaves((args, kwargs))
        )
        device = device_of(model)
        held = tuple(tuple(holding(stage.recurrence, torch.float32).items()) for stage in stages)  # γ may be warming up
        cast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        return leaves, model.training, sum(p.requires_grad for p in model.parameters()), cast, held

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plans": {}}
