"""A step calls the model once, the first step included, however it remembers: no forward pass is hidden from the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg


class Block(nn.Module):
    """Counts its calls, and lets x grow far beyond the range made for the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 100 * torch.tanh(self.linear(x))


class Model(nn.Module):
    """Counts its calls in three ways, and hooks what its blocks give, which cannot be done without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.blocks = nn.Linear(8, 8), nn.ModuleList([Block() for _ in range(6)])
        self.count = 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.momentum = nn.Parameter(torch.zeros(8), requires_grad=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        with torch.no_grad():
            self.momentum.add_(1)
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda g: None)
        return x


class Within(nn.Module):
    """A `MomentumNet` as a part."""

    def __init__(self, memory: Any, gamma: Any) -> None:
        super().__init__()
        self.net = rg.MomentumNet([Block() for _ in range(6)], form="block", memory=memory, gamma=gamma)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("gamma", [0.9, 1 / 8, rg.RandomSign(1 / 8), 0])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store", "auto", 10**9, "20kB", 1.0])
@pytest.mark.parametrize("kind", ["MomentumNet", "converted", "converted by example"])
def test_every_step_calls_the_model_once_and_its_blocks_once_in_forward(kind: str, memory: Any, gamma: Any) -> None:
    """A trial on an example, or a plan within a budget, calls a copy, or nothing that is seen later."""
    if memory == "reverse" and gamma == 0:
        pytest.skip("γ = 0 cannot be reversed")
    model: Any = Within(memory, gamma) if kind == "MomentumNet" else Model()
    x = torch.randn(16, 8)
    if kind == "converted":
        rg.convert(model, stages=["blocks"], memory=memory, gamma=gamma)
    elif kind == "converted by example":
        rg.convert(model, x, memory=memory, gamma=gamma)
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    outside = [m for m in model.modules() if not isinstance(m, Block | nn.Linear)]
    tried = 0 if kind == "MomentumNet" else model.count  # by the trial, which puts buffers and parameters back
    calls: dict[str, int] = {}
    for k, module in enumerate(outside):
        module.register_forward_pre_hook(lambda *_, k=k: calls.update({f"before {k}": calls.get(f"before {k}", 0) + 1}))
        module.register_forward_hook(lambda *_, k=k: calls.update({f"after {k}": calls.get(f"after {k}", 0) + 1}))
    for steps in range(1, 4):
        before = [block.calls for block in blocks]
        y = model(x)
        assert [block.calls - was for block, was in zip(blocks, before, strict=True)] == [1] * 6
        y.square().sum().backward()
        assert set(calls.values()) == {steps}
        if kind != "MomentumNet":
            assert model.count - tried == int(model.steps) == steps
            assert torch.equal(model.momentum, torch.full((8,), float(steps)))
