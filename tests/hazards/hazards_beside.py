"""What blocks do beside computing their output: losses, lists, caches, statistics that belong to nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hazards_precision
import numpy as np
import torch
from hazard_blocks import WIDTH, Mlp, batch, image
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn
from torch.nn.utils import parametrize

THEME = "beside the output"


class Telling(Mlp):
    """Shows f to somebody."""

    def __init__(self, tell: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.tell = tell

    def forward(self, x: Tensor) -> Tensor:
        f = torch.tanh(super().forward(x))
        told = self.tell(f)
        return told if isinstance(told, Tensor) else f


def with_losses(h: Setting, tell: Callable[[list[Tensor], Tensor], Any], empty: str, steps: int = 3) -> Found:
    """Steps whose loss is that of the output and those that the blocks left in a list."""
    losses: list[Tensor] = []
    net = h.net([Telling(lambda f: tell(losses, f)) for _ in range(4)])
    x = batch()
    for _ in range(steps):
        if empty == "first":
            losses.clear()
        net.zero_grad()
        loss = square(net(x)) + torch.stack(losses).sum()
        if empty == "before backward":
            losses.clear()
        loss.backward()
    return collect(net)


@hazard(THEME)
def loss_against_the_block_before(h: Setting) -> Found:
    """losses in a list, each against the detached features of the block before (self-distillation)"""
    features: list[Tensor] = []

    def tell(losses: list[Tensor], f: Tensor) -> None:
        losses.append((f - features[-1]).square().mean() if features else f.sum() * 0)
        features.append(f.detach())

    return with_losses(h, tell, "first", steps=1)


@hazard(THEME)
def loss_with_numpy_negatives(h: Setting) -> Found:
    """losses in a list, against NumPy's random numbers (contrastive negatives)"""

    def tell(losses: list[Tensor], f: Tensor) -> None:
        losses.append((f * torch.from_numpy(np.random.randn(*f.shape)).float()).sum())  # noqa: NPY002

    return with_losses(h, tell, "first", steps=1)


@hazard(THEME)
def losses_emptied_first(h: Setting) -> Found:
    """losses in a list that is emptied before each forward pass, three steps"""
    return with_losses(h, lambda losses, f: losses.append(f.square().mean()), "first")


@hazard(THEME)
def losses_emptied_before_backward(h: Setting) -> Found:
    """losses in a list that is emptied before each backward pass, three steps"""
    return with_losses(h, lambda losses, f: losses.append(f.square().mean()), "before backward")


@hazard(THEME)
def list_as_extra_input(h: Setting) -> Found:
    """a list as extra input, to which every block appends a loss"""

    class Appending(Mlp):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            f = super().forward(x)
            losses.append(f.square().mean())
            return f

    losses: list[Tensor] = []
    net, x = h.net([Appending() for _ in range(4)]), batch()
    (square(net(x, losses)) + torch.stack(losses).sum()).backward()
    return collect(net, length=torch.tensor(len(losses)))


@hazard(THEME)
def differentiable_table_kept(h: Setting) -> Found:
    """a table made of a parameter on first use, and kept for the step"""

    class Table(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.angles = nn.Parameter(torch.randn(WIDTH))
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.cos(self.angles)
            return super().forward(x) * self.table

    return step(h.net([Table() for _ in range(4)]), batch())


@hazard(THEME)
def parametrizations_cached(h: Setting) -> Found:
    """parametrisations under parametrize.cached()"""

    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    for block in blocks:
        parametrize.register_parametrization(block[0], "weight", Symmetric())
    net = h.net(blocks)
    with parametrize.cached():
        return step(net, batch())


@hazard(THEME)
def batchnorm_outside(h: Setting) -> Found:
    """a BatchNorm that belongs to no module"""
    norm = nn.BatchNorm1d(WIDTH)
    found = step(h.net([Telling(lambda f: norm(f)) for _ in range(4)]), batch(6))
    return found | {"running mean": norm.running_mean.clone(), "tracked": norm.num_batches_tracked.clone()}  # type: ignore[union-attr, operator]


@hazard(THEME)
def energy_by_torch_func(h: Setting) -> Found:
    """torch.func.grad inside a block"""

    class Energy(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            f: Tensor = torch.func.grad(lambda x: super(Energy, self).forward(x).square().sum())(x)
            return f

    return step(h.net([Energy() for _ in range(4)]), batch())


class Bell(torch.autograd.Function):
    """exp(-x²), whose backward makes the gradient in the memory of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return y.mul_(-2 * x).mul_(gradient)


@hazard(THEME)
def function_writes_to_its_output(h: Setting) -> Found:
    """a Function whose backward works in the memory of the output it saved"""
    return step(h.net([Telling(Bell.apply) for _ in range(4)]), batch())


@hazard(THEME, undisturbed=True)
def dtype_changed_between(h: Setting) -> Found:
    """model.double() between forward and backward"""
    net = h.net([Mlp() for _ in range(4)])
    return step(net, batch(), between=net.double if h.disturbed else None)


@hazard(THEME)
def threads_changed_between(h: Setting) -> Found:
    """torch.set_num_threads between forward and backward, with GroupNorm"""
    before = torch.get_num_threads()
    blocks = [nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(4)]
    try:
        return step(h.net(blocks, dim=1), image(), between=lambda: torch.set_num_threads(3 - min(before, 2)))
    finally:
        torch.set_num_threads(before)


class Noisy(Mlp):
    """NumPy's noise behind a small scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), scale))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)  # noqa: NPY002
        return self.scale * (torch.tanh(super().forward(x)) + noise)


@hazard(THEME)
def noise_behind_a_small_scale(h: Setting) -> Found:
    """NumPy's noise behind a LayerScale of 1e-6"""
    return step(h.net([Noisy(1e-6) for _ in range(4)]), batch())


@hazard(THEME)
def noise_beside_large_values(h: Setting) -> Found:
    """NumPy's noise, beside |x| = 1e5"""
    return step(h.net([Noisy(1e-3) for _ in range(4)]), (1e5 * batch()).detach())


@hazard(hazards_precision.THEME)
def float64_very_small(h: Setting) -> Found:
    """float64 with |x| = 1e-46"""
    net = h.net([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]).double()
    return step(net, (1e-46 * batch().double()).detach(), loss=lambda y: (1e46 * y).square().mean())


@hazard(hazards_precision.THEME)
def float64_very_large(h: Setting) -> Found:
    """float64 with |x| = 1e39"""
    net = h.net([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]).double()
    return step(net, (1e39 * batch().double()).detach(), loss=lambda y: (1e-39 * y).square().mean())
