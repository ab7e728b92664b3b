"""What a block may change while it runs, and how a replay leaves it alone.

Lists and dictionaries that a block is given, or that are its own (a list of losses), are copied before its first run: a
replay is given them as they were, and what it puts into them is dropped. Running statistics of normalisation layers,
on which the output does not depend, are told from buffers that it may depend on: a replay writes them to scratch memory.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

if TYPE_CHECKING:
    from .parts import Parts

CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})
all_at_once = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in one call into C. No signal comes in between where each of its steps is one, too."""


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
