"""What CUDA asks for: passes captured in a graph, and a backward pass on the thread of the forward pass."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ReplayError


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


def check_capturable(device: torch.device) -> None:
    """Raise if a CUDA graph is being made, which has no room for checks that wait for the device."""
    if capturing_on(device):
        raise RuntimeError(
            "verify='strict' waits for every block's check, which a CUDA graph cannot. Capture with verify='auto', and call "
            "retrograde.settle(model) between replays."
        )


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
