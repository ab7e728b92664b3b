"""The plans of a momentum network within its budget, by kind of input.

What the network needs is seen in a step without values (`measure.dry`): nothing is computed, so the first pass with an input of
a kind already runs as planned. Blocks that cannot be run without values (kernels that PyTorch does not know, sharded
parameters) are measured in a first pass that keeps as little as it can; what backward needs besides is then estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Extra
from ..core.fixedpoint import FixedPoint, integer_dtype
from ..core.parts import Memo
from ..measure.dry import Meter, attention_of, dry, plain, unseen
from ..measure.step import mean_of_squares
from ..stack.forward import Forward
from ..stack.later import Later
from ..stack.momentum import Recurrence
from ..stack.planner import Plan, as_bytes, leanest
from ..stack.residual import residual
from ..stack.timeline import Choice, Track, chain, estimated, planned, within
from .relu import whole

_KINDS = 64  # of input that are remembered


class Seen:
    """A block that marks when it first runs and when its gradient comes."""

    def __init__(self, block: Any, k: int, track: Track, meter: Meter, around: Callable[[], Any]) -> None:
        self.block, self.k, self.track, self.meter, self.around = block, k, track, meter, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = self.k not in self.track.forward
        if first:
            self.track.forward[self.k] = self.meter.mark()
        drawn = self.meter.drawn
        with self.around():
            y = self.block(*args, **kwargs)
        if first and args[0].device.type == "cpu" and (self.meter.drawn > drawn or self.k == 0):
            self.track.places[self.k] = len(torch.default_generator.get_state())
        if first and isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(self._gradient)
        return y

    def _gradient(self, _: Tensor) -> None:
        self.track.backward[self.k] = self.meter.mark()

    def modules(self) -> Iterator[nn.Module]:
        return self.block.modules() if hasattr(self.block, "modules") else iter(())  # v₀ may be a function


def simulated(
    net: nn.Module, blocks: Sequence[Any], launch: tuple[Any, Extra, str] | None, recurrence: Recurrence, form: str,
    plan: Plan, x: Tensor, extra: Extra, verified: bool,
) -> tuple[list[int], Track]:  # fmt: skip
    """The usage of a training step of a momentum network on its own, and its track."""
    around, cached = attention_of(net), torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(x.device.type)
    given = [x, *extra.args, *extra.kwargs.values()]
    with unseen(net.modules()), dry(net, given) as (meter, (x, *rest)):
        own = launch is not None and launch[1] is not extra
        extra = Extra(tuple(rest[: len(extra.args)]), dict(zip(extra.kwargs, rest[len(extra.args) :], strict=True)))
        track = Track.of(plan, recurrence, x, (*net.parameters(), *net.buffers(), x, *extra.tensors))
        seen = [Seen(block, k, track, meter, around) for k, block in enumerate(blocks)]
        if any(recurrence.gammas):
            run = Forward(
                x,
                recurrence,
                FixedPoint(0, integer_dtype(x.dtype, recurrence.narrow)),
                overflow="nan",
                look=track.look,
                **plan.arguments,
            )
            if launch is not None:
                run.launch(Seen(launch[0], -1, track, meter, around), launch[1] if own else extra, launch[2])
            for block in seen:
                run.step(block, extra, whole=whole(block.block))
            y = run.x if x.device.type == "cpu" else run.finish()
            del run
        else:
            settings: dict[str, Any] = {"verify": "off", "stored_from": plan.replayed, "memo": Memo(), "later": Later()}
            y = residual(seen, form, x, extra, look=track.look, **settings)  # type: ignore[arg-type]
        meter.mark()
        loss = mean_of_squares(y)
        del y
        forward = meter.mark()
        torch.autograd.backward(loss, inputs=meter.leaves or None)
        usage = track.placed(meter.usage(cached))
        if cached and not any(recurrence.gammas):  # the plain network's casts stay until the end of forward
            usage[: forward + 1] = [n + meter.cast for n in usage[: forward + 1]]
        if verified:  # gradients are put by, in case they turn out wrong
            spare = sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad)
            usage[forward:] = [n + spare for n in usage[forward:]]
    return usage, track


class Planner:
    """What is known of a network's memory, by kind of input."""

    def __init__(self, budget: Any) -> None:
        self.budget = budget
        self.links: dict[Hashable, tuple[Recurrence, list[Choice], dict[int, Plan]]] = {}  # last: by budget, in bytes
        self.tracks: dict[Hashable, Track] = {}  # of passes that measure

    def plan(
        self, kind: Hashable, recurrence: Recurrence, x: Tensor, known: Callable[[], Sequence[Tensor]],
        simulate: Callable[[Plan], tuple[list[int], Track]],
    ) -> tuple[Plan, Any]:  # fmt: skip
        """The plan for this pass, and what is to look at its blocks. A device waits while this is worked out: what is known is kept.

        Args:
            kind: what decides, besides the network, which tensors the blocks keep.
            known: the tensors that are there anyway.
            simulate: from the leanest plan to the usage of a step and the network's track.
        """
        if kind not in self.links or self.links[kind][0] is not recurrence:
            lean = leanest(recurrence, x.dtype)
            found = self._found(kind, lean, recurrence, x, known(), simulate)
            if isinstance(found, Track):
                return lean, found.look
            while len(self.links) >= _KINDS:
                self.links.pop(next(iter(self.links)))
            self.links[kind] = recurrence, found, {}
        _, links, plans = self.links[kind]
        budget = as_bytes(self.budget, x.device)
        if budget not in plans:
            plans.clear()  # budgets that follow what is free differ from pass to pass
            plans[budget] = planned(within(budget, links, f"an input of shape {tuple(x.shape)}"))[0]
        return plans[budget], None

    def _found(
        self, kind: Hashable, lean: Plan, recurrence: Recurrence, x: Tensor, known: Sequence[Tensor], simulate: Any
    ) -> Track | list[Choice]:
        """The chain of plans; or, where a pass has to show it first, what is to look at that pass."""
        track = self.tracks.get(kind)
        if track is None and plain((x, *known)):
            try:
                usage, track = simulate(lean)
                return chain(usage, [track])
            except Exception:
                track = None  # it shows when the blocks run
        if track is None or set(range(lean.depth)) - set(track.saved):
            while len(self.tracks) >= _KINDS:
                self.tracks.pop(next(iter(self.tracks)))
            self.tracks[kind] = track = Track.of(lean, recurrence, x, known)
            return track
        largest = max((t.numel() * t.element_size() for t in known if isinstance(t, nn.Parameter)), default=0)
        return chain(estimated(track, largest), [track])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tracks": {}}  # they know addresses

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, links={kind: link for kind, link in state["links"].items() if len(link) == 3})
