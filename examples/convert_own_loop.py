"""A model of one's own, with its own loop and extra arguments: converted by trying it out on an example.

python examples/convert_own_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import retrograde as rg


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        )

    def forward(self, x: Tensor, condition: Tensor, scale: float) -> Tensor:
        out: Tensor = x + scale * self.mlp(self.norm(x) + condition)
        return out


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 12) -> None:
        super().__init__()
        self.condition = nn.Linear(4, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        c = self.condition(c)
        for k, layer in enumerate(self.layers):
            x = layer(x, c, scale=1 / (1 + k))
        return x


torch.manual_seed(0)
model, example = Model(), (torch.randn(256, 64), torch.randn(256, 4))

# %% Nothing of the class is known, so the example shows which blocks follow one another.
rg.convert(model, example, memory="store")
stored = rg.measure(model, example)
rg.revert(model)
rg.convert(model, example, memory="reverse")
reversed_ = rg.measure(model, example)
print(f"held for backward: {stored.held:,} bytes stored, {reversed_.held:,} in reverse")
assert torch.equal(stored.output, reversed_.output)
