"""What is to be said of values on an accelerator once they are known: no pass waits for them, the next one says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Then = Callable[[Tensor, str], None]
"""Judges values, and may raise; told of which pass they are: "this" or "an earlier"."""


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being made of what is done to x."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


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

    def tell(self, t: Tensor, then: Then) -> None:
        """Judge t: at once, or on an accelerator when a later pass finds it fetched."""
        if type(t) is not Tensor or t.is_meta:  # without values
            return
        if capturing(t):  # the host must not look, and what it would see is of no later pass
            return
        fetched = t if t.device.type == "cpu" else t.to("cpu", non_blocking=True)
        event = event_on(t.device)
        if event is None:
            then(fetched, "this")
        else:
            self.waiting.append((fetched, event, then))

    def collect(self, x: Tensor) -> None:
        """At the start of a pass on x: judge what has been fetched."""
        while self.waiting and not capturing(x) and self.waiting[0][1].query():
            values, _, then = self.waiting.pop(0)
            then(values, "an earlier")

    def settle(self) -> None:
        """Judge all of it now, waiting for the device."""
        while self.waiting:
            values, event, then = self.waiting.pop(0)
            event.synchronize()
            then(values, "an earlier")

    def __reduce__(self) -> Any:
        return Later, ()
