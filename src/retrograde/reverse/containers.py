"""Copies of what a block may change: lists and dictionaries that it is given, or that are its own; buffers.

Containers are copied before a block's first run: a replay is given them as they were, and what it puts into them is
dropped.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

from torch import Tensor, nn

all_at_once = deque[Any](maxlen=0).extend
"""Runs an iterator to its end in one call into C. No signal comes in between where each of its steps is one, too."""
CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})


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


def copied_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], copies: dict[int, Any], tensors: list[Tensor] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`copied` of what a block is given."""
    return copied(args, copies, tensors), {name: copied(value, copies, tensors) for name, value in kwargs.items()}


def exchanged_buffers(modules: Iterable[nn.Module]) -> tuple[Iterator[Any], Iterator[Any]]:
    """The calls that give modules copies of their buffers to work on, and those that put the buffers back; for `all_at_once`."""
    own = [m._buffers for m in modules if m._buffers]
    copies = [{name: b if b is None else b.clone() for name, b in of.items()} for of in own]
    originals = list(map(dict, own))
    return map(dict.update, own, copies), map(dict.update, own, originals)
