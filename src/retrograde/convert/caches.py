"""Key-value caches that a block may be given.

A block is run several times, so it must find a cache as its first run did: each run gets a copy of the cache to write to. Left out
altogether it would be nearly the same; but keys and values out of a cache are laid out in another way, which attention shows in the
last bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..reverse.extra import Extra


class Spare:
    """A cache of which every run of a block gets a copy."""

    def __init__(self, cache: Any) -> None:
        self.cache = _copied(cache)

    @staticmethod
    def of(value: Any) -> Any:
        return _copied(value.cache) if isinstance(value, Spare) else value


def with_spares(extra: Extra, path: str) -> Extra:
    """The extra inputs with spares for caches."""

    def spare(value: Any) -> Any:
        if not _is_cache(value):
            return value
        if value.get_seq_length():
            raise ValueError(
                f"{path} was given a key-value cache with something in it while gradients are recorded. A block that writes to "
                "a cache cannot be run again in backward: pass use_cache=False and no past_key_values, or convert with memory='store'."
            )
        return Spare(value)

    return _mapped(spare, extra)


def spared(extra: Extra) -> Extra:
    """Extra inputs for a run that is to leave no trace in a key-value cache."""
    return _mapped(lambda value: _copied(value) if _is_cache(value) else value, extra)


def _mapped(function: Callable[[Any], Any], extra: Extra) -> Extra:
    if not any(map(_is_cache, (*extra.args, *extra.kwargs.values()))):
        return extra
    return Extra(tuple(map(function, extra.args)), {name: function(value) for name, value in extra.kwargs.items()})


def _copied(cache: Any) -> Any:
    """A copy, of its tensors too: deepcopy refuses those with a gradient, and those without values."""
    return copy.deepcopy(cache, {id(t): t.clone() for t in _tensors_in(cache)})


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and not isinstance(value, Tensor)


def _tensors_in(cache: Any) -> Iterator[Tensor]:
    """The tensors of a cache, those of its layers, and of the caches that it is made of."""
    named = cache if isinstance(cache, dict) else getattr(cache, "__dict__", {})
    for part in cache if isinstance(cache, list | tuple) else named.values():
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, list | tuple | dict) or _is_cache(part) or hasattr(part, "keys"):
            yield from _tensors_in(part)
