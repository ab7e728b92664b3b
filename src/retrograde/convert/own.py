"""A converted block's own forward, as the steps of a stage call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .caches import Spare


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
