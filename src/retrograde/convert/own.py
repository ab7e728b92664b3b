"""A converted block's own forward, as the steps of a stage call it, and the key-value caches that it may be given.

A block is run several times, so it must find a cache as its first run did: each run gets a copy of the cache to write to. Left out
altogether it would be nearly the same; but keys and values out of a cache are laid out in another way, which attention shows in the
last bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..memory.fake import is_fake
from ..reverse.extra import Extra


class Own:
    """A converted block's own forward, with x first and one tensor out.

    What the block returns besides (attention weights, a position bias) is kept from its first run.

    Args:
        forward: its own, or f of relu(x + f(x)).
        keyword: the name by which the block was given x; None: by its place.
        whole: it is its own though the steps would form relu(x + f) themselves.
        uses: what it uses of the block, the submodules that it may run among them; None: perhaps everything.
    """

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], keyword: str | None, whole: bool = False,
        uses: tuple[str, ...] | None = None,
    ) -> None:  # fmt: skip
        self.block = block
        self.forward = forward
        self.keyword = keyword
        self.whole = whole
        self.uses = uses
        self.out: Any = None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tuple(map(Spare.of, args)), {name: Spare.of(value) for name, value in kwargs.items()}
        if self.keyword is not None:
            kwargs[self.keyword] = x
        else:
            args = (x, *args)
        out = self.forward(self.block, *args, **kwargs)
        if isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            if self.out is None:
                self.out = (type(out), out[1:])
            return out[0]
        return out

    def with_x(self, x: Tensor) -> Any:
        """What the block returned in its first run, with this x."""
        if self.out is None:
            return x
        kind, rest = self.out
        self.out = ()
        return kind((x, *rest)) if kind in (tuple, list) else kind(x, *rest)

    def modules(self) -> Iterator[nn.Module]:
        own = vars(self.block)
        if self.uses is None or any(name in own and hasattr(type(self.block), name) for name in self.uses):
            return self.block.modules()  # a method that was replaced on the object may use anything
        used = [module for name, module in self.block._modules.items() if name in self.uses and module is not None]
        return iter(dict.fromkeys((self.block, *(inside for module in used for inside in module.modules()))))


class Spare:
    """A cache of which every run of a block gets a copy."""

    def __init__(self, cache: Any) -> None:
        self.cache = copy.deepcopy(cache)

    @staticmethod
    def of(value: Any) -> Any:
        return copy.deepcopy(value.cache) if isinstance(value, Spare) else value


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
        inside = (v for layer in getattr(value, "layers", ()) for v in vars(layer).values())
        if any(map(is_fake, inside)):
            raise TypeError(
                f"{path} was given a key-value cache that cannot be copied without values: pass use_cache=False."
            )
        return Spare(value)

    return _mapped(spare, extra)


def spared(extra: Extra) -> Extra:
    """Extra inputs for a run that is to leave no trace in a key-value cache."""

    def copied(value: Any) -> Any:
        if not _is_cache(value):
            return value
        tensors = {id(t): t.clone() for t in _tensors_in(value)}  # deepcopy refuses those with a gradient
        return copy.deepcopy(value, tensors)

    return _mapped(copied, extra)


def _mapped(function: Callable[[Any], Any], extra: Extra) -> Extra:
    if not any(map(_is_cache, (*extra.args, *extra.kwargs.values()))):
        return extra
    return Extra(tuple(map(function, extra.args)), {name: function(value) for name, value in extra.kwargs.items()})


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
