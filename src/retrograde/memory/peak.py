"""Peak memory of a function. Every allocation is counted, none is sampled.

    peak = max over t of (bytes allocated since the start and alive at time t)
    held = the same at the moment the function returns, while its result is alive

On a CPU the profiler reports every call of PyTorch's allocator with its address and size, so temporaries inside a kernel
count as well. The free of an address that was allocated before the start is ignored. Memory that a library takes from the
system itself (Python's objects) is not seen: `system_growth` sees it, and what the C library cannot use again.

On a GPU the allocator keeps both figures: its maximum, and what is allocated now, both less what was allocated at the start.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from ..reverse.heap import malloc_trim, resident
from .units import human

_RETURNED = "retrograde::returned"
_FORGET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Peak:
    """Bytes above the start: the most at any time (`peak`), and those alive when the function returned (`held`)."""

    peak: int
    held: int

    def __str__(self) -> str:
        return f"peak {human(self.peak)}, held {human(self.held)}"


def peak_memory(
    fn: Callable[[], Any], then: Callable[[Any], Any] | None = None, *, device: torch.device | str = "cpu"
) -> Peak:
    """The most memory that `fn`, and `then` of its result, allocate at any time.

    Args:
        fn: what to measure. `held` is read when it returns.
        then: called with the result of `fn`, and part of the peak. With a forward pass as `fn` and the backward pass as
            `then`, `held` is what the forward pass keeps for the backward pass.
        device: the device whose memory is measured, a CPU or a CUDA device.

    Raises:
        ValueError: for a device that is neither.
        RuntimeError: on a CPU while a profiler is running. Another measurement is one too.

    >>> peak_memory(lambda: torch.ones(250_000) + torch.ones(250_000))
    Peak(peak=3000000, held=1000000)
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory can be measured on a CPU or a CUDA device; got {str(device)!r}.")
    gc.collect()
    return (_on_cpu if device.type == "cpu" else _on_cuda)(fn, then, device)


def held_bytes(fn: Callable[[], Any], *, device: torch.device | str = "cpu") -> int:
    """Bytes that the result of `fn` keeps alive, autograd's saved tensors included.

    >>> x = torch.ones(1000, requires_grad=True)
    >>> held_bytes(lambda: x.exp().exp())  # two outputs, each kept for its own gradient
    8000
    """
    return peak_memory(fn, device=device).held


def system_growth(fn: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes that the system gives while `fn` runs, at most: to this process (resident) or, on a GPU, to the allocator (reserved).

    Free pages are given back before. None where the system does not say: it takes Linux.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_reserved(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device) - start
    trim = malloc_trim()
    try:
        if trim is not None:
            trim(0)
        _FORGET.write_text("5")  # the peak so far
    except OSError:
        return None
    start = resident()
    fn()
    return max(0, 1024 * int(_STATUS.read_text().split("VmHWM:")[1].split()[0]) - start)


def _on_cpu(fn: Callable[[], Any], then: Callable[[Any], Any] | None, device: torch.device) -> Peak:
    if torch.autograd._profiler_enabled():
        raise RuntimeError(
            "memory on a CPU is measured by PyTorch's profiler, and one is running: a profile, or another measurement. Measure "
            "outside of it."
        )
    with (
        _quiet_profiler(),
        profile(use_kineto=True, profile_memory=True) as profiler,  # torch.profiler's first makes a table of all events
    ):
        result = fn()
        with record_function(_RETURNED):
            pass
        if then is not None:
            then(result)
    alive: dict[int, int] = {}
    now = peak = held = 0
    for event in sorted(_events(profiler), key=lambda event: event.start_time_ns):
        if event.name == _RETURNED:
            held = now
        elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
            now -= alive.pop(address, 0)
            if size > 0:
                alive[address] = size
                now += size
                peak = max(peak, now)
    return Peak(peak, held)


def _on_cuda(fn: Callable[[], Any], then: Callable[[Any], Any] | None, device: torch.device) -> Peak:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    result = fn()
    held = torch.cuda.memory_allocated(device) - start
    if then is not None:
        then(result)
    torch.cuda.synchronize(device)
    return Peak(torch.cuda.max_memory_allocated(device) - start, held)


def _events(profiler: Any) -> Iterator[Any]:
    """All events of a profile, nested ones included."""
    todo = list(profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        yield event
        todo.extend(event.children)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler writes a line to the terminal at every start and stop, unless this is set when it is first used."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "6"
    try:
        yield
    finally:
        del os.environ[name]
