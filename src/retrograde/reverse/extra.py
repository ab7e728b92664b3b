"""What a block is run with besides x, and what must be as it was when it is run again: extra inputs, random numbers, autocast.

A block may draw inside `torch.random.fork_rng` and leave no trace, so where the generators stand is noted before every
run. That has to cost little: the place of a CUDA generator is two integers, its seed and its offset; that of the CPU's
is 5 kB, and is shared between runs that find it unmoved. While a CUDA graph is captured the place of a CUDA generator
can be neither read nor set: blocks that draw from one are refused then (`cuda.Undrawn`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from .changes import all_at_once, copied
from .cuda import capturing_on

Autocast = list[tuple[str, bool, torch.dtype, bool]]
Places = tuple[list[tuple[int, int]], list[Tensor]]
exporting = getattr(torch.compiler, "is_exporting", bool)  # not in torch 2.6
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_latest: list[tuple[Tensor, Tensor]] = []  # the last state seen of the CPU's generator, and as words


class Extra:
    """The inputs that every block of a network gets besides x."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        leaves = tree_leaves((args, kwargs)) if args or kwargs else ()
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self.watched = [t for t in self.tensors if not t.is_inference()]
        copies: dict[int, Any] = {}
        if args or kwargs:
            copied((args, *kwargs.values()), copies)
        self.contains = bool(copies)  # lists or dictionaries, which a block may put something into
        self._surroundings: Surroundings | None = None

    def surroundings(self, x: Tensor) -> Surroundings:
        """Those of the blocks of this pass."""
        if self._surroundings is None:
            devices = tuple({t.device for t in (x, *self.tensors) if t.device.type not in ("cpu", "meta")})
            self._surroundings = Surroundings(x.device.type, devices, self.generators)
        return self._surroundings


def unusual() -> bool:
    """Whether a function transform, a forward-mode derivative or a tracer is at work."""
    traced = torch.jit.is_tracing() or exporting() or torch._C._get_dispatch_mode(_PROXY) is not None
    return traced or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


class Surroundings:
    """How autocast is set, and the generators that a block may draw from: the CPU's, the devices', and any that it is given."""

    def __init__(self, device: str, devices: Sequence[torch.device], given: Sequence[torch.Generator]) -> None:
        everyone = [torch.default_generator, *map(_default, devices), *given]
        self.capturing = any(map(capturing_on, devices))
        self.counted = [g for g in everyone if g.device.type == "cuda" and not self.capturing]
        self.others = [g for g in everyone if g.device.type != "cuda"]
        self.device = device
        self.autocast = autocast_state(device)

    def places(self) -> Places:
        """Where the generators stand."""
        return [(g.initial_seed(), g.get_offset()) for g in self.counted], [g.get_state() for g in self.others]

    def put(self, places: Places) -> None:
        """Let them stand there again."""
        all_at_once(self.putting(places))

    def putting(self, places: Places) -> Iterator[Any]:
        """The calls by which they stand there again."""
        counted, states = places
        return chain(
            map(torch.Generator.manual_seed, self.counted, [seed for seed, _ in counted]),
            map(torch.Generator.set_offset, self.counted, [offset for _, offset in counted]),
            map(torch.Generator.set_state, self.others, states),
        )

    def exchanged(self, places: Places, casts: bool) -> tuple[Iterator[Any], Iterator[Any]]:
        """The calls by which all is as it was, with generators at these places, and those by which it is as it is now.

        `casts`: whether what autocast has cast is let go of then.
        """
        now = autocast_state(self.device)
        then, put_back = self.putting(places), self.putting(self.places())
        put_back = chain(starmap(torch.clear_autocast_cache, [()] if casts else []), put_back)
        if now != self.autocast:
            then = chain(then, starmap(torch.autocast_increment_nesting, [()]), autocast_put(self.autocast))
            put_back = chain(autocast_put(now), starmap(torch.autocast_decrement_nesting, [()]), put_back)
        return then, put_back


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


def autocast_state(device: str) -> Autocast:
    """How autocast is set, for the CPU and this kind of device."""
    cache = torch.is_autocast_cache_enabled()
    devices = ("cpu",) if device in ("cpu", "meta") else ("cpu", device)
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices]


def autocast_put(noted: Autocast) -> Iterator[Any]:
    """The calls that set autocast as noted."""
    devices, enabled, dtypes, caches = zip(*noted, strict=True)
    return chain(
        map(torch.set_autocast_enabled, devices, enabled),
        map(torch.set_autocast_dtype, devices, dtypes),
        map(torch.set_autocast_cache_enabled, caches[:1]),
    )
