"""One run of one block, written down so that it can be run again to the bit.

What a block computes depends on more than its input: its parameters, its extra inputs, train or eval mode, random
numbers, autocast. A `Call` notes all of these at the first run and restores (mode, random numbers, autocast) or
checks (parameters, extra inputs) them at every later one. Running statistics of normalisation layers move in
the first run only: later runs put theirs aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from .errors import ReplayError
from .verify import checksum

Devices = tuple[torch.device, ...]


class Extra:
    """The inputs that every block of a network gets besides x."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]

    def devices(self, x: Tensor) -> Devices:
        """Whose random generators a block may draw from, besides the CPU's."""
        if not self.tensors:
            return () if x.device.type in ("cpu", "meta") else (x.device,)
        return tuple({t.device for t in (x, *self.tensors) if t.device.type not in ("cpu", "meta")})


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


class Read(Function):
    """A value as the output of a node: it requires gradients, and unlike a leaf it may be worked on in place."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, box: list[Tensor]) -> Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Call:
    """A block, what it was run with, and how to run it again."""

    def __init__(self, block: Callable[..., Any], extra: Extra, name: str, *, verified: bool) -> None:
        self.block, self.extra, self.name, self.verified = block, extra, name, verified
        self.modules = tuple(block.modules()) if isinstance(block, nn.Module) else ()
        self.parameters = [p for m in self.modules for p in m._parameters.values() if p is not None]
        self.training = [m.training for m in self.modules]
        self.checksum: int | None = None

    def first(self, x: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Run the block for the first time, under hooks for the tensors that autograd wants saved."""
        self.requires_grad = x.requires_grad
        self.versions = _versions(self.parameters) + _versions(self.extra.tensors)
        buffers = _versions(b for m in self.modules if not _has_statistics(m) for b in m._buffers.values())
        self.devices = self.extra.devices(x)
        self.autocast = _autocast_state(x.device.type)
        self.rng: list[Tensor] | None = _rng_state(self.devices)
        with saved_tensors_hooks(pack, unpack):
            y = self.block(x, *self.extra.args, **self.extra.kwargs)
        if all(map(torch.equal, self.rng, _rng_state(self.devices))):
            self.rng = None
        _check_unchanged(self.versions, f"{self.name} changed a parameter or an extra input while it ran")
        _check_unchanged(buffers, f"{self.name} changed one of its buffers while it ran")
        if self.verified and isinstance(y, Tensor):
            self.checksum = checksum(y)
        return y

    def again(self, x: Tensor, saved: list[Tensor]) -> Tensor:
        """Run the block as it was run first, on a fresh x; `saved` receives the tensors that autograd wants saved."""
        _check_unchanged(self.versions, f"a parameter or extra input of {self.name} was changed after its forward pass")

        def pack(t: Tensor) -> int:
            saved.append(t.detach())
            return len(saved) - 1

        with ExitStack() as stack:
            stack.enter_context(_modes(self.modules, self.training))
            stack.enter_context(_other_buffers((m for m in self.modules if _has_statistics(m)), _scratch))
            if self.autocast != _autocast_state(x.device.type):
                for device, enabled, dtype, cache in self.autocast:
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            if self.rng is not None:
                stack.enter_context(rng_from(self.rng, self.devices))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, saved.__getitem__))
            if self.requires_grad:
                x = Read.apply(x.new_zeros((), requires_grad=True).expand(x.shape), [x])
            y = self.block(x, *self.extra.args, **self.extra.kwargs)
        if self.checksum is not None and checksum(y) != self.checksum:
            raise ReplayError(
                f"{self.name} did not repeat itself: run again in backward on the same input, it gave another output. Make it "
                "deterministic (random numbers from torch's own generators, no state of its own, no atomics: "
                "torch.use_deterministic_algorithms(True)), or keep its activations with memory='store'."
            )
        return y.detach()


def _versions(tensors: Iterable[Tensor | None]) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in tensors if t is not None and not t.is_inference()]


def _check_unchanged(versions: list[tuple[Tensor, int]], problem: str) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            raise ReplayError(
                f"{problem} (a tensor of shape {tuple(tensor.shape)}), so the block cannot be run again as it was. "
                "Change it before the forward or after the backward pass, or use memory='store'."
            )


def _has_statistics(module: nn.Module) -> bool:
    """Whether running the module moves running statistics on which its output does not depend."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


@contextmanager
def _modes(modules: Sequence[nn.Module], training: list[bool]) -> Iterator[None]:
    changed = [m for m, mode in zip(modules, training, strict=True) if m.training != mode]
    for m in changed:
        m.training = not m.training
    try:
        yield
    finally:
        for m in changed:
            m.training = not m.training


def copied_buffers(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let the modules work on copies of their buffers."""
    return _other_buffers(modules, Tensor.clone)


@contextmanager
def _other_buffers(modules: Iterable[nn.Module], other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    originals = [(m, dict(m._buffers)) for m in modules if m._buffers]
    for m, buffers in originals:
        m._buffers.update({name: b if b is None else other(b) for name, b in buffers.items()})
    try:
        yield
    finally:
        for m, buffers in originals:
            m._buffers.update(buffers)


def _scratch(statistics: Tensor) -> Tensor:
    """Somewhere to put running statistics that nobody will read."""
    return _scratch_like(statistics.shape, statistics.dtype, statistics.device)


@lru_cache(maxsize=64)
def _scratch_like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _autocast_state(device: str) -> list[tuple[str, bool, torch.dtype, bool]]:
    cache, devices = torch.is_autocast_cache_enabled(), sorted({"cpu", device} - {"meta"})
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices]


def _rng_state(devices: Devices) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in devices)]


def _set_rng_state(states: list[Tensor], devices: Devices) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def rng_from(states: list[Tensor] | None, devices: Devices) -> Iterator[None]:
    """Draw random numbers from these states of the generators (None: as they are), and leave the generators as they were."""
    now = _rng_state(devices)
    _set_rng_state(states or now, devices)
    try:
        yield
    finally:
        _set_rng_state(now, devices)
