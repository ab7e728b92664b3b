"""Blocks run by a compiled function."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import count

import torch
from torch import Tensor, nn


def run(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


_serial = count(1)


def compiled(backend: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """`run`, compiled, with a code object of its own.

    The compiler keeps what it made by code object, and what it made under one activation budget would be found under
    another. One function serves all blocks, so like blocks are compiled once.
    """
    code = run.__code__.replace(co_firstlineno=10_000 + next(_serial))
    return torch.compile(types.FunctionType(code, run.__globals__, "run"), backend=backend, dynamic=False)


class Compiled(nn.Module):
    """A block run by a compiled function."""

    def __init__(self, block: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.block, x)
