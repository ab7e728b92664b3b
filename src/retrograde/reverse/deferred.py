"""Deferred checks. On an accelerator we never wait for the device to read a result: a copy to the host is started,
and the error, if any, is raised at the start of a later pass, or by `retrograde.settle`.

A pass in a CUDA graph is run by the host once, when it is captured. Its replays add what there is to say to memory
outside of the graph; the next pass that is not one of them fetches it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import RangeOverflow, ReplayError
from .cuda import capturing

Judge = Callable[[Tensor, str], None]
"""Looks at values, and may raise; it is told which pass they are of: "this" or "an earlier"."""

FIRST_STEP = (
    "a CUDA graph cannot be made of a network's first step: its range and its checks are not set up yet. Run two or three steps like "
    "the one to be captured first, on a side stream, as torch.cuda.graph asks for anyway."
)


def event_on(device: torch.device) -> Any:
    """An event at the end of what the device has been given to do."""
    module = torch.get_device_module(device)
    event, stream = module.Event(), getattr(module, "current_stream", None)
    event.record() if stream is None else event.record(stream(device))  # of this device: another may be the current one
    return event


class Deferred:
    """Values on their way to the host, in the order in which they were told. Copies and pickles of it are empty.

    Args:
        event_on: makes an event at the end of a device's work; None: as the device does. On a CPU values are known at once.
        capturing: whether a CUDA graph is being made of what is done to a tensor.
    """

    def __init__(
        self, event_on: Callable[[torch.device], Any] | None = None, capturing: Callable[[Tensor], bool] = capturing
    ) -> None:
        self.event_on = event_on
        self.capturing = capturing
        self.waiting: list[tuple[Tensor, Any, Judge]] = []
        # for replays of CUDA graphs: what they leave, by kind of value; who judges it; and what is being fetched
        self.rooms: dict[Any, Tensor] = {}
        self.captured: dict[Any, Judge] = {}
        self.fetching: set[Any] = set()

    def tell(self, t: Tensor, judge: Judge, of: Any = None) -> None:
        """Judge t: at once on a CPU, on an accelerator when a later pass finds it fetched.

        Args:
            of: what t is about, the same in every pass: by it a replay of a CUDA graph finds its room.
        """
        if type(t) is not Tensor or t.is_meta:  # without values
            return
        if not self.waits(t):
            judge(t, "this")
            return
        kind = self._kind(t, judge, of)
        if self.capturing(t):  # the host cannot look
            if kind not in self.rooms:
                raise RuntimeError(FIRST_STEP)
            torch.maximum(self.rooms[kind], t, out=self.rooms[kind])
            self.captured[kind] = judge
            return
        self._fetch(t, judge)
        self.prepare(t, judge, of)

    def prepare(self, t: Tensor, judge: Judge, of: Any = None) -> None:
        """Make room for what replays of a CUDA graph will have to tell of values like t."""
        kind = self._kind(t, judge, of)
        if kind not in self.rooms and not self.capturing(t):
            with torch.inference_mode(False):  # for passes of any kind
                self.rooms[kind] = torch.zeros_like(t)

    def waits(self, t: Tensor) -> bool:
        """Whether the host has to wait for values on the device of t."""
        return t.device.type != "cpu" or self.event_on is not None

    def _kind(self, t: Tensor, judge: Judge, of: Any) -> Any:
        return t.shape, t.dtype, t.device, getattr(judge, "func", judge), of

    def collect(self, x: Tensor) -> None:
        """At the start of a pass on x: judge what has been fetched."""
        if self.capturing(x):
            return
        self._fetch_rooms()
        while self.waiting and self.waiting[0][1].query():
            self._judge_next()

    def settle(self) -> None:
        """Judge everything now, waiting for the device. Raises the first error after all have been judged."""
        for device in {self.rooms[kind].device for kind in self.captured}:
            torch.get_device_module(device).synchronize(device)  # graphs may be replayed on any stream
        self._fetch_rooms()
        errors: list[Exception] = []
        while self.waiting:
            self.waiting[0][1].synchronize()
            try:
                self._judge_next()
            except (RangeOverflow, ReplayError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _judge_next(self) -> None:
        values, _, judge = self.waiting.pop(0)
        judge(values, "an earlier")

    def _fetch_rooms(self) -> None:
        """Start fetching what replays of CUDA graphs have left, where that is not under way already."""
        for kind in self.captured.keys() - self.fetching:
            self.fetching.add(kind)
            self._fetch(self.rooms[kind].clone(), partial(self._judge_room, kind))
            self.rooms[kind].zero_()

    def _judge_room(self, kind: Any, values: Tensor, when: str) -> None:
        self.fetching.discard(kind)
        if values.any():  # else there was no replay
            self.captured[kind](values, when)

    def _fetch(self, t: Tensor, judge: Judge) -> None:
        """Start fetching t."""
        fetched = t if t.device.type == "cpu" else t.to("cpu", non_blocking=True)
        self.waiting.append((fetched, (self.event_on or event_on)(t.device), judge))

    def __reduce__(self) -> Any:
        return Deferred, ()
