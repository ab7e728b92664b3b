"""What is to be said of values on an accelerator once they are known: no pass waits for them, the next one says it.

A pass in a CUDA graph is run by the host but once, when it is captured. Its replays add what there is to be said to memory outside of
the graph: the next pass that is not one of them has it fetched, and a later one, or `settle`, says it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.errors import RangeOverflow, ReplayError

Then = Callable[[Tensor, str], None]
"""Judges values, and may raise; told of which pass they are: "this" or "an earlier"."""


WARM_UP = (
    "a CUDA graph cannot be made of a network's first step: its range and its checks are not set up yet. Run two or three steps like "
    "the one to be captured first, on a side stream, as torch.cuda.graph asks for anyway."
)


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being made of what is done to x."""
    return x.is_cuda and capturing_on(x.device)


def capturing_on(device: torch.device) -> bool:
    """Whether a CUDA graph is being made of what is done on this device."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # tensors without values may say so anywhere
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_capturable(verify: str, device: torch.device) -> None:
    """Raise if the device is to be asked, by this way of checking, while a CUDA graph is captured."""
    if verify in ("end", "blocks") and capturing_on(device):
        raise RuntimeError(
            f"verify={verify!r} looks at every backward pass before it goes on, which a CUDA graph cannot. Capture with verify='auto', "
            "and call retrograde.settle(model) between replays."
        )


def event_on(device: torch.device) -> Any:
    """An event at the end of what the device has been given to do; None where values are known at once."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    event, stream = module.Event(), getattr(module, "current_stream", None)
    event.record() if stream is None else event.record(stream(device))  # of this device: another may be the current one
    return event


class Later:
    """Values under way to the host, in the order in which they were told of. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Any, Then]] = []
        self.rooms: dict[Any, Tensor] = {}  # for replays of graphs, by what is told; zero before them
        self.captured: dict[Any, Then] = {}
        self.looked: set[Any] = set()  # at which rooms, without knowing yet what was there

    def tell(self, t: Tensor, then: Then, of: Any = None) -> None:
        """Judge t: at once, or on an accelerator when a later pass finds it fetched. `of`: what it is of, in every pass the same."""
        if type(t) is not Tensor or t.is_meta:  # without values
            return
        kind = t.shape, t.dtype, t.device, getattr(then, "func", then), of
        if capturing(t):  # the host cannot look
            if kind not in self.rooms:
                raise RuntimeError(WARM_UP)
            torch.maximum(self.rooms[kind], t, out=self.rooms[kind])
            self.captured[kind] = then
        elif self._fetch(t, then) and kind not in self.rooms:
            with torch.inference_mode(False):  # for passes of any kind
                self.rooms[kind] = torch.zeros_like(t)

    def collect(self, x: Tensor) -> None:
        """At the start of a pass on x: judge what has been fetched."""
        if capturing(x):
            return
        self._look()
        while self.waiting and self.waiting[0][1].query():
            self._judge()

    def settle(self) -> None:
        """Judge all of it now, waiting for the device. What is not as it should be is said once, whatever else is not."""
        for device in {self.rooms[kind].device for kind in self.captured}:
            torch.get_device_module(device).synchronize(device)  # graphs may be replayed on any stream
        self._look()
        errors = list[Exception]()
        while self.waiting:
            self.waiting[0][1].synchronize()
            try:
                self._judge()
            except (RangeOverflow, ReplayError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _judge(self) -> None:
        values, _, then = self.waiting.pop(0)
        then(values, "an earlier")

    def _look(self) -> None:
        """At what replays have left; where the last look is still under way, later."""
        for kind in self.captured.keys() - self.looked:
            self.looked.add(kind)
            self._fetch(self.rooms[kind].clone(), partial(self._left, kind))
            self.rooms[kind].zero_()

    def _left(self, kind: Any, values: Tensor, when: str) -> None:
        self.looked.discard(kind)
        if values.any():  # else there was no replay
            self.captured[kind](values, when)

    def _fetch(self, t: Tensor, then: Then) -> bool:
        """Have t on its way to be judged; where values are known at once, judge it: whether it is on its way."""
        fetched = t if t.device.type == "cpu" else t.to("cpu", non_blocking=True)
        event = event_on(t.device)
        if event is None:
            then(fetched, "this")
            return False
        self.waiting.append((fetched, event, then))
        return True

    def __reduce__(self) -> Any:
        return Later, ()
