"""A converted block's own forward, as the steps of a stage call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .cache import Spare


class Own:
    """A converted block's own forward, with x first and one tensor out.

    What the block returns besides (attention weights, a position bias) is put by in its first run.

    Args:
        forward: its own, or f of relu(x + f(x)).
        whole: it is its own though the steps would form relu(x + f) themselves.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any], keyword: str | None, whole: bool = False) -> None:
        self.block, self.forward, self.keyword, self.whole = block, forward, keyword, whole
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
        return self.block.modules()
