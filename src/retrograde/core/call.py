"""One run of one block, written down so that it can be run again to the bit.

What a block computes depends on more than its input: its parameters and buffers, its extra inputs, train or eval mode,
random numbers, autocast. A `Call` notes all of these at the first run; at every later one it puts them back as they were
(which tensors, mode, random numbers, autocast) and checks that no tensor was changed in place. Running statistics of
normalisation layers move in the first run only: later runs put theirs aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .errors import ReplayError
from .verify import checksum

Devices = tuple[torch.device, ...]


class Extra:
    """The inputs that every block of a network gets besides x."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        leaves = tree_leaves((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self.rng: list[Tensor] = []  # as it was before the last run: blocks that draw nothing share one state

    def devices(self, x: Tensor) -> Devices:
        """Whose random generators a block may draw from, besides the CPU's."""
        if not self.tensors:
            return () if x.device.type in ("cpu", "meta") else (x.device,)
        return tuple({t.device for t in (x, *self.tensors) if t.device.type not in ("cpu", "meta")})


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
        self.buffers = [(m, dict(m._buffers)) for m in self.modules if m._buffers and not _has_statistics(m)]
        # a sharded parameter (DTensor) is gathered and put back by its own machinery: that is left alone
        self.registered = [(m, dict(m._parameters)) for m in self.modules if m._parameters and _plain(m._parameters)]
        self.training = [m.training for m in self.modules]
        self.checksum: int | None = None

    def first(self, x: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Run the block for the first time, under hooks for the tensors that autograd wants saved."""
        self.requires_grad = x.requires_grad
        buffers = (b for _, registered in self.buffers for b in registered.values())
        self.versions = _versions((*self.parameters, *self.extra.tensors, *buffers))
        self.devices = self.extra.devices(x)
        self.autocast = _autocast_state(x.device.type)
        state = _rng_state(self.devices, self.extra.generators)
        if len(state) != len(self.extra.rng) or not all(map(torch.equal, state, self.extra.rng)):
            self.extra.rng = state
        self.rng = self.extra.rng
        with saved_tensors_hooks(pack, unpack):
            y = self.block(x, *self.extra.args, **self.extra.kwargs)
        _check_unchanged(self.versions, f"{self.name} changed a parameter, a buffer or an extra input while it ran")
        for m, registered in self.buffers:
            for name, b in registered.items():
                if m._buffers.get(name) is not b:
                    raise ReplayError(f"{self.name} replaced its buffer {name!r} while it ran. {_ADVICE}")
        if self.verified and isinstance(y, Tensor):
            self.checksum = checksum(y)
        return y

    def again(self, x: Tensor, saved: list[Tensor]) -> Tensor:
        """Run the block as it was run first, on a fresh x; `saved` receives the tensors that autograd wants saved."""
        _check_unchanged(
            self.versions, f"a parameter, buffer or extra input of {self.name} was changed after its forward pass"
        )
        versions: list[int] = []

        def pack(t: Tensor) -> int:
            saved.append(t.detach())
            versions.append(t._version)
            return len(saved) - 1

        with ExitStack() as stack:
            stack.enter_context(_modes(self.modules, self.training))
            stack.enter_context(_swapped((m._buffers, b) for m, b in self.buffers))
            stack.enter_context(_swapped((m._parameters, p) for m, p in self.registered))
            statistics = [m._buffers for m in self.modules if _has_statistics(m)]
            stack.enter_context(_swapped((own, {name: _scratch(b) for name, b in own.items()}) for own in statistics))
            if self.autocast != _autocast_state(x.device.type):
                for device, enabled, dtype, cache in self.autocast:
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            stack.enter_context(rng_from(self.rng, self.devices, self.extra.generators))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, saved.__getitem__))
            if self.requires_grad:
                x = Read.apply(x.new_zeros((), requires_grad=True).expand(x.shape), [x])
            y = self.block(x, *self.extra.args, **self.extra.kwargs)
        if [t._version for t in saved] != versions:
            raise ReplayError(
                f"{self.name} changed a tensor in place that autograd had saved for its gradient. Use the operation that is not "
                "in place."
            )
        if self.checksum is not None and checksum(y) != self.checksum:
            raise ReplayError(
                f"{self.name} did not repeat itself: run again in backward on the same input, it gave another output. Make it "
                "deterministic (random numbers from torch's own generators, no state of its own, no atomics: "
                "torch.use_deterministic_algorithms(True)), or keep its activations with memory='store'."
            )
        return y.detach()


_ADVICE = "So the block cannot be run again as it was. Change it before the forward or after the backward pass, or use memory='store'."


def _plain(registered: dict[str, Any]) -> bool:
    return all(p is None or type(p) in (Tensor, nn.Parameter) for p in registered.values())


def _versions(tensors: Iterable[Tensor | None]) -> list[tuple[Tensor, int]]:
    return [(t, t._version) for t in tensors if t is not None and not is_lazy(t) and not t.is_inference()]


def _check_unchanged(versions: list[tuple[Tensor, int]], problem: str) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            raise ReplayError(f"{problem} (a tensor of shape {tuple(tensor.shape)}). {_ADVICE}")


def _has_statistics(module: nn.Module) -> bool:
    """Whether running the module moves running statistics on which its output does not depend."""
    if not isinstance(module, _NormBase) or not module.training or not module.track_running_stats:
        return False
    return type(module).forward in (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)


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
    own = [m._buffers for m in modules if m._buffers]
    return _swapped((b, {name: t if t is None else t.clone() for name, t in b.items()}) for b in own)


@contextmanager
def _swapped(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Fill each first dictionary with the second one's entries for a while."""
    originals = [(own, dict(own), other) for own, other in pairs]
    try:
        for own, _, other in originals:
            own.update(other)
        yield
    finally:
        for own, original, _ in originals:
            own.clear()
            own.update(original)


def _scratch(statistics: Tensor | None) -> Tensor | None:
    """Somewhere to put running statistics that nobody will read."""
    return statistics if statistics is None else _scratch_like(statistics.shape, statistics.dtype, statistics.device)


@lru_cache(maxsize=64)
def _scratch_like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _autocast_state(device: str) -> list[tuple[str, bool, torch.dtype, bool]]:
    cache, devices = torch.is_autocast_cache_enabled(), sorted({"cpu", device} - {"meta"})
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices]


def _rng_state(devices: Devices, generators: Sequence[torch.Generator]) -> list[Tensor]:
    of_devices = [torch.get_device_module(d).get_rng_state(d) for d in devices]
    return [torch.get_rng_state(), *of_devices, *(g.get_state() for g in generators)]


def _set_rng_state(states: list[Tensor], devices: Devices, generators: Sequence[torch.Generator]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=False):
        torch.get_device_module(device).set_rng_state(state, device)
    for generator, state in zip(generators, states[1 + len(devices) :], strict=True):
        generator.set_state(state)


@contextmanager
def rng_from(states: list[Tensor] | None, devices: Devices, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw random numbers from these states of the generators (None: as they are), and leave the generators as they were."""
    now = _rng_state(devices, generators)
    if states is not None:
        _set_rng_state(states, devices, generators)
    try:
        yield
    finally:
        _set_rng_state(now, devices, generators)
