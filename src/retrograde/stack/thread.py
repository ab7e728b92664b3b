"""Same thread, same bits."""

from __future__ import annotations

import threading

import torch


class SameThread:
    """While one is alive, backward passes started on this thread also run on it.

    cuDNN chooses its algorithms per thread, and autograd runs CUDA work on threads of its own: with autotuning
    (`cudnn.benchmark`) a block could be run again by another algorithm, to other bits. The setting is put back when the
    graph that holds this object goes; backward itself restores, on its way out, the setting it was started with.
    """

    alive = threading.local()

    def __init__(self) -> None:
        self.owner, self.alive.count = threading.get_ident(), getattr(self.alive, "count", 0) + 1
        if self.alive.count == 1:
            self.alive.before = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)

    def __del__(self) -> None:
        if threading.get_ident() == self.owner:
            self.alive.count -= 1
            if self.alive.count == 0:
                torch._C._set_multithreading_enabled(self.alive.before)
