"""What a block may change while it runs, and how a replay leaves it alone.

Lists and dictionaries that a block is given, or that are its own (a list of losses), are copied before its first run: a
replay is given them as they were, and what it puts into them is dropped. Running statistics of normalisation layers,
on which the output does not depend, are told from buffers that it may depend on: a replay writes them to scratch memory.
Other buffers that a block moves (a spectral norm's vectors, moving averages, counters) are copied before its first run: a
replay finds their values of then, and what it writes to them is dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from ..errors import ReplayError
from .cuda import capturing

if TYPE_CHECKING:
    from .parts import Parts

CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
all_at_once = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in one call into C. No signal comes in between where each of its steps is one, too."""


def version(x: Tensor) -> int:
    """How often x was written to; of tensors of inference mode that is not counted."""
    return 0 if x.is_inference() else x._version


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


class Containers:
    """The containers that a block may change, as they were before its first run: among its arguments, and attributes of its modules.

    Attributes:
        tensors: those in them.
    """

    def __init__(self, parts: Parts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = [(vars(parts.modules[k]), names) for k, names in parts.noted if names]
        attributes = [{name: of[name] for name in names if name in of} for of, names in own]
        self.tensors: list[Tensor] = []
        self.contents = self._copied((args, kwargs, attributes), self.tensors)
        self.tensors = [t for t in self.tensors if not t.is_inference()]

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any], list[dict[str, Any]]]:
        """Arguments and attributes for one replay."""
        return self._copied(self.contents, None)

    @staticmethod
    def _copied(contents: Any, tensors: list[Tensor] | None) -> Any:
        args, kwargs, attributes = contents
        copies: dict[int, Any] = {}
        attributes = [{name: copied(value, copies, tensors) for name, value in of.items()} for of in attributes]
        args = copied(args, copies, tensors)
        return args, {name: copied(value, copies, tensors) for name, value in kwargs.items()}, attributes


def exchanged_buffers(modules: Iterable[nn.Module]) -> tuple[Iterator[Any], Iterator[Any]]:
    """The calls that give modules copies of their buffers to work on, and those that put the buffers back; for `all_at_once`."""
    own = [m._buffers for m in modules if m._buffers]
    copies = [{name: b if b is None else b.clone() for name, b in of.items()} for of in own]
    originals = list(map(dict, own))
    return map(dict.update, own, copies), map(dict.update, own, originals)


STATISTICS_ONLY = {_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward}
"""Forward methods that in training write running statistics and never read them. Those of other libraries may be added."""


def has_statistics(module: nn.Module) -> bool:
    """Whether running the module moves running statistics on which its output does not depend."""
    if not isinstance(module, _NormBase) or not module.training or not module.track_running_stats:
        return False
    return type(module).forward in STATISTICS_ONLY


def scratch(statistics: Tensor | None, shared: bool) -> Tensor | None:
    """Somewhere to put running statistics that nobody will read. `shared`: others may write there, too."""
    if (
        statistics is None or not shared or type(statistics) is not Tensor
    ):  # one without values (FakeTensor) is not to be kept
        return None if statistics is None else torch.zeros_like(statistics)
    return _scratch_like(statistics.shape, statistics.dtype, statistics.device)


@lru_cache(maxsize=64)
def _scratch_like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def memory_of(t: Tensor) -> int:
    """By which tensors that share their memory are known."""
    return t.untyped_storage()._cdata if t.layout is torch.strided and not t.is_mkldnn else id(t)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether values are known, and are others."""
    return type(a) is Tensor and not a.is_meta and not capturing(a) and not torch.equal(a, b)


class Buffers:
    """A block's buffers, running statistics aside, as they were before its first run; those that it moves are copied.

    Which ones move is seen in the first run of all, for which all are copied: by their values, since `F.batch_norm` writes in a way
    that PyTorch does not count. If one of a module moves, all of that module are copied from then on.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        every = [(of, name, b) for of, own in parts.buffers for name, b in own.items()]
        self.before = [(of, name, b) for of, name, b in every if b is not None and not is_lazy(b)]
        self.versions = [version(b) for _, _, b in self.before]
        known = parts.moving
        self.copies = {(id(of), n): b.clone() for of, n, b in self.before if known is None or id(of) in known}

    def ran(self, name: str) -> None:
        """The block has run: keep the copies of what it has moved.

        Raises:
            ReplayError: if it moved one that it had not moved before, so that there is no copy.
        """
        known = self.parts.moving
        states = zip(self.before, self.versions, strict=True)
        moved = {(id(of), n): n for (of, n, b), was in states if of.get(n) is not b or version(b) != was}
        if known is None:
            moved |= {(id(of), n): n for of, n, b in self.before if differ(b, self.copies[id(of), n])}
        moving = {of for of, _ in moved}
        if not moving <= (known or set()):
            self._refuse_shared(name, moved)
        self.parts.moving = moving | (known or set())
        unknown = next((n for place, n in moved.items() if place not in self.copies), None)
        if unknown is not None:
            raise ReplayError(
                f"{name} changed its buffer {unknown!r}, which it had not done before, so there is no copy of its value. In the next "
                "step there is one: skip this step, or use memory='store'."
            )
        self.copies = {place: b for place, b in self.copies.items() if place[0] in self.parts.moving}

    def _refuse_shared(self, name: str, moved: dict[tuple[int, str], str]) -> None:
        """Raise if one that was written to shares its memory: a replay would find its value of before by one name alone."""
        held = Counter(
            memory_of(t)
            for m in self.parts.modules
            for t in (*m._parameters.values(), *m._buffers.values(), *vars(m).values())
            if isinstance(t, Tensor)
        )
        for of, n, b in self.before:
            whole = b.layout is torch.strided and b.untyped_storage().nbytes() == b.numel() * b.element_size()
            if (id(of), n) in moved and of.get(n) is b and (not whole or held[memory_of(b)] > 1):
                raise ReplayError(
                    f"{name} changed its buffer {n!r} while it ran, and that shares its memory with another tensor of the block. So "
                    "the block cannot be run again as it was. Give each memory of its own, or use memory='store'."
                )

    def check(self, name: str) -> None:
        """Raise if one that the block does not move was written to after its run."""
        for (of, n, b), was in zip(self.before, self.versions, strict=True):
            if version(b) != was and (id(of), n) not in self.copies:
                raise ReplayError(
                    f"the buffer {n!r} of {name} was changed after its forward pass, so the block cannot be run again as it was. "
                    "Change it before the forward or after the backward pass, or use memory='store'."
                )

    def fresh(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Dictionaries of buffers, and what a replay is to find in them."""
        moved = [(of, n, self.copies[id(of), n]) for of, n, _ in self.before if (id(of), n) in self.copies]
        return [(of, {n: b.clone()}) for of, n, b in moved]
