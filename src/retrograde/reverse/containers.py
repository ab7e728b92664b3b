"""Copies of what a block may change: lists and dictionaries that it is given, or that are its own; buffers.

Containers are copied before a block's first run: a replay is given them as they were, and what it puts into them is
dropped.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor, nn

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


@contextmanager
def copied_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the modules work on copies of their buffers for a while."""
    own = [m._buffers for m in modules if m._buffers]
    originals = [dict(entries) for entries in own]
    try:
        for entries in own:
            entries.update({name: b if b is None else b.clone() for name, b in entries.items()})
        yield
    finally:
        for entries, original in zip(own, originals, strict=True):
            entries.update(original)
