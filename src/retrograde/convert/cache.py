"""Key-value caches among the extra inputs of blocks, which every run of a block writes to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..reverse.replay import Extra


class Spare:
    """A key-value cache of which every run of a block gets a copy to write to, so that it finds it as the first run did.

    Left out altogether it would be nearly the same; but keys and values out of a cache are laid out in another way, which
    attention shows in the last bits.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = copy.deepcopy(cache)

    @staticmethod
    def of(value: Any) -> Any:
        return copy.deepcopy(value.cache) if isinstance(value, Spare) else value


def cached(value: Any) -> bool:
    """Whether an extra input is one."""
    return hasattr(value, "get_seq_length") and not isinstance(value, Tensor)


def spared(extra: Extra) -> Extra:
    """Extra inputs for a run that is to leave no trace in a key-value cache."""
    if not any(map(cached, (*extra.args, *extra.kwargs.values()))):
        return extra
    return Extra(tuple(map(_copied, extra.args)), {name: _copied(value) for name, value in extra.kwargs.items()})


def _copied(value: Any) -> Any:
    if not cached(value):
        return value
    tensors = {id(t): t.clone() for t in _inside(value)}  # deepcopy refuses those with a gradient
    return copy.deepcopy(value, tensors)


def _inside(cache: Any) -> Iterator[Tensor]:
    """The tensors of a cache, those of its layers, and of the caches that it is made of."""
    named = cache if isinstance(cache, dict) else getattr(cache, "__dict__", {})
    for part in cache if isinstance(cache, list | tuple) else named.values():
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, list | tuple | dict) or cached(part) or hasattr(part, "keys"):
            yield from _inside(part)
