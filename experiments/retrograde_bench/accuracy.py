"""Relative errors of outputs and gradients: of fixed point against a float64 recurrence, of narrow state against float32.

    fixed_point()   100 blocks W2 tanh(W1 x + b), γ = 0.9 and 0.99: the table of docs/momentumnet.md
    narrow()        bottleneck blocks under bfloat16 autocast, x and v in 32 and in 16 bits

Gradients are carried in the dtype of the network's input.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde_experiments.private import momentum_options

from .networks import mlp

HEADER = ("", "output", "input gradient", "parameter gradients, median", "worst")


@dataclass(frozen=True)
class Errors:
    """Relative errors; of the parameter gradients, the median and the worst."""

    name: str
    output: float
    input: float
    parameters: float
    worst: float

    @property
    def cells(self) -> list[str]:
        return [self.name, *(f"{e:.2g}" for e in (self.output, self.input, self.parameters, self.worst))]


def compared(name: str, found: Sequence[Tensor], exact: Sequence[Tensor]) -> Errors:
    """Output, gradient of the input, gradients of the parameters; against the exact ones."""
    output, gx, *rest = (
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, exact, strict=True)
    )
    return Errors(name, output, gx, statistics.median(rest), max(rest))


class Recurrence(nn.Module):
    """v ← γ·v + (1−γ)·f(x), x ← x + v, in floats."""

    def __init__(self, blocks: Sequence[nn.Module], gamma: float) -> None:
        super().__init__()
        self.blocks, self.gamma = nn.ModuleList(blocks), gamma

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros_like(x)
        for block in self.blocks:
            v = self.gamma * v + (1 - self.gamma) * block(x)
            x = x + v
        return x


def fixed_point(depth: int = 100, width: int = 64, batch: int = 32) -> Iterator[Errors]:
    """Fixed point without guard digits and as it comes, and plain float32, against float64."""
    for gamma, bits in ((0.9, 23), (0.99, 24)):
        torch.manual_seed(0)
        blocks = mlp(depth, width).stages[0].branches()  # type: ignore[operator]
        x = torch.randn(batch, width)
        exact = _taken(Recurrence(copy.deepcopy(blocks), gamma).double(), x.double())
        nets: dict[str, nn.Module] = {"float32 recurrence": Recurrence(blocks, gamma)}
        for name, digits in ((f"{bits} bits, no guard digits", (bits, torch.int32)), ("as it comes", "auto")):
            nets[name] = rg.MomentumNet(blocks, gamma=gamma, **momentum_options("reverse", digits, "auto"))
        for name, net in nets.items():
            yield compared(f"γ = {gamma}, {name}", _taken(net, x), exact)


class Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = channels // 4
        self.conv1, self.bn1 = nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2, self.bn2 = nn.Conv2d(narrow, narrow, 3, padding=1, bias=False), nn.BatchNorm2d(narrow)
        self.conv3, self.bn3 = nn.Conv2d(narrow, channels, 1, bias=False), nn.BatchNorm2d(channels)
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + x)


def narrow(depth: int = 35, channels: int = 64, batch: int = 8, side: int = 14) -> Iterator[Errors]:
    """Momentum networks under bfloat16 autocast against the same in float32; and the plain network likewise."""
    torch.manual_seed(0)
    shape = (batch, channels, side, side)
    x, g = torch.relu(torch.randn(shape)), torch.randn(shape)
    torch.manual_seed(1)
    blocks = [Bottleneck(channels) for _ in range(depth)]

    def momentum(fixed_point: str = "auto") -> nn.Module:
        options = momentum_options("store", fixed_point, "auto")
        return rg.MomentumNet(copy.deepcopy(blocks), gamma=0.9, form="block", **options)

    def plain() -> nn.Module:
        return nn.Sequential(*copy.deepcopy(blocks))

    half = torch.bfloat16
    yield compared(
        "plain bfloat16, against plain float32", _taken(plain(), x.to(half), g, amp=True), _taken(plain(), x, g)
    )
    exact = _taken(momentum(), x, g)
    yield compared("32-bit state, float32 input", _taken(momentum(), x, g, amp=True), exact)
    yield compared("32-bit state, bfloat16 input", _taken(momentum(), x.to(half), g, amp=True), exact)
    yield compared("16-bit state, bfloat16 input", _taken(momentum("int16"), x.to(half), g, amp=True), exact)


def _taken(net: nn.Module, x: Tensor, g: Tensor | None = None, amp: bool = False) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters of one step.

    Args:
        g: the gradient of the output; None for that of a mean of squares.
    """
    net.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = net(x)
    (y.square().mean() if g is None else (y.float() * g).sum()).backward()
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in net.parameters())) if t is not None]
