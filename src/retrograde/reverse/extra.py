"""What a block is run with besides x, and what must be as it was when it is run again: extra inputs, random numbers, autocast.

A block may put something into a list that it is given, or that is its own. So containers are copied before its first
run: a replay is given them as they were, and what it puts into them is dropped.

A block may draw inside `torch.random.fork_rng` and leave no trace, so where the generators stand is noted before every
run. That has to cost little: the place of a CUDA generator is two integers, its seed and its offset; that of the CPU's
is 5 kB, and is shared between runs that find it unmoved. While a CUDA graph is captured the place of a CUDA generator
can be neither read nor set: blocks that draw from one are refused then (`cuda.Undrawn`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .cuda import capturing_on

CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
all_at_once = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in one call into C. No signal comes in between where each of its steps is one, too."""
Autocast = list[tuple[str, bool, torch.dtype, bool]]
Places = tuple[list[tuple[int, int]], list[Tensor]]
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
        self._around: tuple[Generators, Autocast] | None = None

    def around(self, x: Tensor) -> tuple[Generators, Autocast]:
        """The generators that a block may draw from, and how autocast is set."""
        if self._around is None:
            devices = tuple({t.device for t in (x, *self.tensors) if t.device.type not in ("cpu", "meta")})
            self._around = Generators(devices, self.generators), autocast_state(x.device.type)
        return self._around


def copied(value: Any, copies: dict[int, Any], tensors: list[Tensor] | None = None, inside: bool = False) -> Any:
    """The value; containers in it copied, so that what is put into them later is not in the copies.

    Tensors in containers come without their graphs, which would lead back to the copies.

    Args:
        copies: receives the copies, by the identity of what they are copies of.
        tensors: receives the tensors that are in containers.
        inside: whether the value is in a container.

    >>> given = ([1], {"a": [2]})
    >>> kept = copied(given, {})
    >>> given[1]["a"].append(3)
    >>> kept
    ([1], {'a': [2]})
    """
    kind = type(value)
    if inside and isinstance(value, Tensor):
        value = value if value.grad_fn is None else value.detach().requires_grad_()
        if tensors is not None:
            tensors.append(value)
        return value
    if kind is tuple:
        return tuple(copied(v, copies, tensors, inside) for v in value)
    if kind not in CONTAINERS or id(value) in copies:
        return copies.get(id(value), value)
    other = copies[id(value)] = copy(value)
    if kind is not set:
        for key, v in list(value.items() if isinstance(value, dict) else enumerate(value)):
            other[key] = copied(v, copies, tensors, True)
    return other


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
        all_at_once(self.putting(places))

    def putting(self, places: Places) -> Iterator[Any]:
        """The calls by which they stand there again."""
        counted, states = places
        return chain(
            map(torch.Generator.manual_seed, self.counted, [seed for seed, _ in counted]),
            map(torch.Generator.set_offset, self.counted, [offset for _, offset in counted]),
            map(torch.Generator.set_state, self.others, states),
        )


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


def autocast_put(noted: Autocast, now: Autocast) -> Iterable[Any]:
    """The calls that set autocast as noted, if it is not so now."""
    if noted == now:
        return ()
    devices, enabled, dtypes, caches = zip(*noted, strict=True)
    return chain(
        map(torch.set_autocast_enabled, devices, enabled),
        map(torch.set_autocast_dtype, devices, dtypes),
        map(torch.set_autocast_cache_enabled, caches[:1]),
    )
