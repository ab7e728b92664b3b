"""A step calls the model once, the first step included, however it remembers: no forward pass is hidden from the user."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

CALLS: list[str] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
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
@pytest.mark.parametrize("converted", [True, False])
def test_every_step_calls_the_model_once(converted: bool, memory: Any, gamma: Any) -> None:
    if memory == "reverse" and gamma == 0:
        pytest.skip("γ = 0 cannot be reversed")
    model: Any = Model() if converted else Within(memory, gamma)
    if converted:
        rg.convert(model, stages=["blocks"], memory=memory, gamma=gamma)
    outside = [m for m in model.modules() if not isinstance(m, Block | nn.Linear)]
    calls: dict[str, int] = {}
    for k, module in enumerate(outside):
        module.register_forward_pre_hook(lambda *_, k=k: calls.update({f"before {k}": calls.get(f"before {k}", 0) + 1}))
        module.register_forward_hook(lambda *_, k=k: calls.update({f"after {k}": calls.get(f"after {k}", 0) + 1}))
    for steps in range(1, 4):
        model(torch.randn(16, 8)).square().sum().backward()
        assert set(calls.values()) == {steps}
        if converted:
            assert model.count == int(model.steps) == steps
            assert torch.equal(model.momentum, torch.full((8,), float(steps)))
