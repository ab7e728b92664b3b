"""Blocks and inputs that the hazards share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from problems import Of

WIDTH, CHANNELS = 8, 4


class Mlp(nn.Module):
    """f(x) = W₂ tanh(W₁x + b)."""

    def __init__(self, hidden: int = 12, gain: float = 1.0) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        if gain != 1:
            with torch.no_grad():
                self.outer.weight.mul_(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Own(Of):
    """An Mlp with a forward of its own, and with what it keeps."""

    def __init__(self, run: Callable[..., Tensor], **kept: Any) -> None:
        super().__init__(run, **vars(Mlp())["_modules"], **kept)

    def f(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Attention(nn.Module):
    """Pre-norm self-attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.attention(h, h, h, need_weights=False)[0]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def several(make: Callable[[], nn.Module], depth: int = 4) -> list[nn.Module]:
    return [make() for _ in range(depth)]


def mlps(depth: int = 4, gain: float = 1.0) -> list[nn.Module]:
    return several(lambda: Mlp(gain=gain), depth)


def then(function: Callable[..., Tensor]) -> nn.Module:
    """An Mlp and a function of its output."""
    return nn.Sequential(Mlp(), Function(function))


def dense(*after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *after)


def conv(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), norm, nn.Tanh())


def batch(rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, requires_grad=True)


def tokens() -> Tensor:
    return torch.randn(2, 5, WIDTH, requires_grad=True)


def image() -> Tensor:
    return torch.randn(3, CHANNELS, 5, 5, requires_grad=True)
