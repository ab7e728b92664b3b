"""The survey of a converted model before its first training step."""

import torch
from torch import Tensor, nn

import retrograde as rg


class Growing(nn.Module):
    """x grows by a constant."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Watched(nn.Module):
    """Puts a hook on what each block gives, which cannot be done without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Growing(100.0) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.register_hook(lambda g: None)
        return x


def test_one_that_was_cut_off_leaves_no_range_behind() -> None:
    """Of the first block alone, it would be far too narrow for the others."""
    model = rg.convert(Watched(), stages=["layers"], gamma=0.5)
    x = torch.ones(3, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
    assert all(layer.by.grad is not None for layer in model.layers)
