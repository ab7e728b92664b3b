"""What must be as it was when a block is run again: random numbers, autocast, the thread.

A block may draw inside `torch.random.fork_rng` and leave no trace, so where the generators stand is noted before every run. That has to
cost little: the place of a CUDA generator is two integers, its seed and its offset; that of the CPU's is 5 kB, and is shared between
runs that find it unmoved. While a CUDA graph is captured the place of a CUDA generator can be neither read nor set: blocks that draw
from one are refused then (`Undrawn`), all others are captured as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ReplayError
from .deferred import capturing_on

Autocast = list[tuple[str, bool, torch.dtype, bool]]
Places = tuple[list[tuple[int, int]], list[Tensor]]
_latest: list[tuple[Tensor, Tensor]] = []  # the last state seen of the CPU's generator, and as words


class Generators:
    """Those that a block may draw from: the CPU's, the devices', and any that it is given."""

    def __init__(self, devices: Sequence[torch.device], given: Sequence[torch.Generator]) -> None:
        everyone = [torch.default_generator, *map(_default, devices), *given]
        self.capturing = any(map(capturing_on, devices))
        self.counted = [g for g in everyone if g.device.type == "cuda" and not self.capturing]
        self.others = [g for g in everyone if g.device.type != "cuda"]

    def places(self) -> Places:
        """Where they stand."""
        return [(g.initial_seed(), g.get_offset()) for g in self.counted], [g.get_state() for g in self.others]

    def put(self, places: Places) -> None:
        """Let them stand there again."""
        for g, (seed, offset) in zip(self.counted, places[0], strict=True):
            if g.initial_seed() != seed:
                g.manual_seed(seed)
            g.set_offset(offset)
        for g, state in zip(self.others, places[1], strict=True):
            g.set_state(state)


def _default(device: torch.device) -> Any:
    """A device's own generator."""
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return torch.get_device_module(device).default_generators[device.index]


def shared(places: Places) -> Places:
    """The places, to be kept; that of the CPU's generator in the memory of the last one seen, if it is the same."""
    counted, (state, *given) = places
    if torch._C._len_torch_dispatch_stack():  # tensors may be without values: nothing can be compared
        return places
    words = state.view(torch.int64)
    latest = _latest[0] if _latest else None  # another thread may exchange it meanwhile
    if latest is None or not torch.equal(latest[1], words):
        latest = (state, words)
        _latest[:] = [latest]
    return counted, [latest[0], *given]


class Undrawn(TorchDispatchMode):
    """Refuses operators that draw random numbers on a CUDA device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            idle = any(given.get(name) == 0 for name in ("p", "dropout_p", "dropout")) or given.get("train") is False
            if not idle and any(isinstance(t, Tensor) and t.is_cuda for t in given.values()):
                raise ReplayError(
                    f"{func} draws random numbers while a CUDA graph is captured: use memory='store' for that."
                )
        return func(*args, **(kwargs or {}))


def autocast_state(device: str) -> Autocast:
    """How autocast is set, for the CPU and this kind of device."""
    cache = torch.is_autocast_cache_enabled()
    devices = ("cpu",) if device in ("cpu", "meta") else ("cpu", device)
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices]


class SameThread:
    """While one is alive, backward passes started on this thread also run on it.

    NOTE 6 (same thread). cuDNN autotunes per thread, and autograd runs CUDA work on threads of its own: with
    `cudnn.benchmark` a replay there could pick another algorithm and other bits. The setting is put back when the
    graph that holds this object goes; backward itself restores, on its way out, the setting it was started with.
    """

    alive = threading.local()

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.alive.count = getattr(self.alive, "count", 0) + 1
        if self.alive.count == 1:
            self.alive.before = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)

    def __del__(self) -> None:
        if threading.get_ident() == self.owner:
            self.alive.count -= 1
            if self.alive.count == 0:
                torch._C._set_multithreading_enabled(self.alive.before)
