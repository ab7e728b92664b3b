"""The inputs that every block of a network gets besides x, and copies of the containers among them.

A block may put something into a list that it is given, or that is its own. So containers are copied before its first
run: a replay is given them as they were, and what it puts into them is dropped.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .surroundings import Autocast, Generators, autocast_state

CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})


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
