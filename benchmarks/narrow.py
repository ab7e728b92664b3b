"""What narrow state and narrow gradients cost in accuracy: a stack of bottleneck blocks under bfloat16 autocast against the same in
float32. The table of docs/log.md, "Narrower state, narrower gradients".

    python benchmarks/narrow.py                  # seconds on a CPU
    python benchmarks/narrow.py --depth 8

Gradients are carried in the dtype of the network's input, so the row with float32 gradients has a float32 input, and hands x on in
float32 too. Headroom is not an option of the library: 3 bits are had by moving a calibrated range.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.stack.calibrate import widened


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


@dataclass(frozen=True)
class Problem:
    """A stack of blocks, its input, and the gradient of its output."""

    blocks: list[nn.Module]
    x: Tensor
    g: Tensor

    @staticmethod
    def drawn(depth: int, channels: int = 64, batch: int = 8, side: int = 14) -> Problem:
        torch.manual_seed(0)
        shape = (batch, channels, side, side)
        x, g = torch.relu(torch.randn(shape)), torch.randn(shape)
        torch.manual_seed(1)
        return Problem([Bottleneck(channels) for _ in range(depth)], x, g)

    def plain(self) -> nn.Module:
        return nn.Sequential(*copy.deepcopy(self.blocks))

    def momentum(self, state_bits: int | str = "auto") -> rg.MomentumNet:
        blocks = copy.deepcopy(self.blocks)
        return rg.MomentumNet(blocks, gamma=0.9, form="block", memory="store", state_bits=state_bits)

    def roomier(self, bits: int) -> rg.MomentumNet:
        """16-bit state with so many bits of headroom more than the library gives it."""
        net = self.momentum(16)
        self.step(net, torch.bfloat16, amp=True)
        net.range.fixed[torch.int16] = widened(net.range.fixed[torch.int16], bits)
        net.zero_grad()
        return net

    def step(self, net: nn.Module, dtype: torch.dtype, amp: bool) -> list[Tensor]:
        """Output, gradient of the input, gradients of the parameters; the input in this dtype."""
        x = self.x.to(dtype, copy=True).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = net(x)
        (y.float() * self.g).sum().backward()
        return [t.detach().float() for t in (y, x.grad, *(p.grad for p in net.parameters())) if t is not None]


@dataclass(frozen=True)
class Row:
    """Relative errors; of the parameter gradients, the median and the worst."""

    name: str
    output: float
    input: float
    parameters: float
    worst: float

    def __str__(self) -> str:
        errors = (self.output, self.input, self.parameters, self.worst)
        return f"| {self.name} | " + " | ".join(f"{e:.3g}" for e in errors) + " |"


def compared(name: str, found: Sequence[Tensor], exact: Sequence[Tensor]) -> Row:
    output, gx, *rest = (float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
    return Row(name, output, gx, statistics.median(rest), max(rest))


def rows(problem: Problem) -> Iterator[Row]:
    exact = problem.step(problem.plain(), torch.float32, amp=False)
    found = problem.step(problem.plain(), torch.bfloat16, amp=True)
    yield compared("plain bfloat16 network, against plain float32", found, exact)
    exact = problem.step(problem.momentum(), torch.float32, amp=False)
    half = torch.bfloat16
    for name, net, dtype in (
        ("momentum, 32-bit state, x and gradients carried in float32", problem.momentum(), torch.float32),
        ("momentum, 32-bit state, x and gradients carried in bfloat16", problem.momentum(), half),
        ("momentum, 16-bit state, 3 bits of headroom, bfloat16", problem.roomier(1), half),
        ("momentum, 16-bit state, 2 bits of headroom, bfloat16", problem.momentum(16), half),
    ):
        yield compared(name, problem.step(net, dtype, amp=True), exact)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Relative errors of narrow state and narrow gradients.")
    parser.add_argument("--depth", type=int, default=35, help="blocks in the stack")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--side", type=int, default=14, help="of the images, in pixels")
    given = parser.parse_args(arguments)
    print("| | output | input gradient | parameter gradients | worst of them |\n|---|---|---|---|---|")
    for row in rows(Problem.drawn(given.depth, given.channels, given.batch, given.side)):
        print(row, flush=True)


if __name__ == "__main__":
    main()
