"""Relative error of outputs and gradients against a float64 recurrence: the table of docs/momentumnet.md.

python benchmarks/accuracy.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import retrograde as rg


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def recurrence(blocks: nn.ModuleList, gamma: float, x: Tensor) -> Tensor:
    v = torch.zeros_like(x)
    for block in blocks:
        v = gamma * v + (1 - gamma) * block(x)
        x = x + v
    return x


def errors(gamma: float, fraction_bits: int | str | None, depth: int = 100) -> str:
    """fraction_bits None: the float32 recurrence itself. A number: no guard digits."""
    torch.manual_seed(0)
    blocks, x = nn.ModuleList(Mlp() for _ in range(depth)), torch.randn(32, 64)
    exact, x64 = copy.deepcopy(blocks).double(), x.double()
    truth = recurrence(exact, gamma, x64)
    truths = [truth.detach(), *torch.autograd.grad(truth.square().mean(), list(exact.parameters()))]
    if fraction_bits is None:
        y = recurrence(blocks, gamma, x)
    else:
        y = rg.MomentumNet(blocks, gamma=gamma, memory="reverse", fraction_bits=fraction_bits)(x)
    ours = [y.detach(), *torch.autograd.grad(y.square().mean(), list(blocks.parameters()))]
    found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, truths, strict=True)]
    return f"output {found[0]:.1e}   worst parameter gradient {max(found[1:]):.1e}"


if __name__ == "__main__":
    for gamma, bits in ((0.9, 23), (0.99, 24)):
        print(f"γ = {gamma}  float32 recurrence            {errors(gamma, None)}")
        print(f"γ = {gamma}  {bits} bits, no guard digits     {errors(gamma, bits)}")
        print(f"γ = {gamma}  calibrated, guard digits      {errors(gamma, 'auto')}")
