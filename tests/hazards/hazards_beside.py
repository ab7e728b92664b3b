"""What blocks do beside computing their output: losses, lists, caches, statistics that belong to nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hazard_blocks import WIDTH, Function, Mlp, Own, batch, dense, image, mlps, several
from hazard_registry import Found, Theme, collect, square, step, undisturbed
from torch import Tensor, nn
from torch.nn.utils import parametrize


def drawn(*shape: int) -> Tensor:
    """NumPy's random numbers."""
    return torch.from_numpy(np.random.randn(*shape)).float()  # noqa: NPY002


def with_losses(h: Theme, tell: Callable[[list[Tensor], Tensor], Any], empty: str = "first", steps: int = 3) -> Found:
    """Steps whose loss is that of the output and those that the blocks left in a list."""
    losses: list[Tensor] = []

    def telling(f: Tensor) -> Tensor:
        tell(losses, f)
        return f

    net = h.net(several(lambda: nn.Sequential(Mlp(), nn.Tanh(), Function(telling))))
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


def size(losses: list[Tensor], f: Tensor) -> None:
    losses.append(f.square().mean())


def appending(block: Own, x: Tensor, losses: list[Tensor]) -> Tensor:
    f = block.f(x)
    size(losses, f)
    return f


def tabled(block: Own, x: Tensor) -> Tensor:
    if block.table is None:
        block.table = torch.cos(block.angles)
    return block.f(x) * block.table


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


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


def noisy(scale: float) -> list[nn.Module]:
    """NumPy's noise behind a small scale."""

    def body(block: Own, x: Tensor) -> Tensor:
        return block.scale * (torch.tanh(block.f(x)) + drawn(*x.shape))

    return several(lambda: Own(body, scale=nn.Parameter(torch.full((WIDTH,), scale))))


class BesideTheOutput(Theme):
    theme = "beside the output"

    def loss_against_the_block_before(self) -> Found:
        """losses in a list, each against the detached features of the block before (self-distillation)"""
        features: list[Tensor] = []

        def tell(losses: list[Tensor], f: Tensor) -> None:
            losses.append((f - features[-1]).square().mean() if features else f.sum() * 0)
            features.append(f.detach())

        return with_losses(self, tell, steps=1)

    def loss_with_numpy_negatives(self) -> Found:
        """losses in a list, against NumPy's random numbers (contrastive negatives)"""
        return with_losses(self, lambda losses, f: losses.append((f * drawn(*f.shape)).sum()), steps=1)

    def losses_emptied_first(self) -> Found:
        """losses in a list that is emptied before each forward pass, three steps"""
        return with_losses(self, size)

    def losses_emptied_before_backward(self) -> Found:
        """losses in a list that is emptied before each backward pass, three steps"""
        return with_losses(self, size, "before backward")

    def list_as_extra_input(self) -> Found:
        """a list as extra input, to which every block appends a loss"""
        losses: list[Tensor] = []
        net, x = self.net(several(lambda: Own(appending))), batch()
        (square(net(x, losses)) + torch.stack(losses).sum()).backward()
        return collect(net, length=torch.tensor(len(losses)))

    def differentiable_table_kept(self) -> Found:
        """a table made of a parameter on first use, and kept for the step"""
        return self.step(several(lambda: Own(tabled, angles=nn.Parameter(torch.randn(WIDTH)), table=None)))

    def parametrizations_cached(self) -> Found:
        """parametrisations under parametrize.cached()"""
        blocks = several(dense)
        for block in blocks:
            parametrize.register_parametrization(block[0], "weight", Symmetric())
        net = self.net(blocks)
        with parametrize.cached():
            return step(net)

    def batchnorm_outside(self) -> Found:
        """a BatchNorm that belongs to no module"""
        norm = nn.BatchNorm1d(WIDTH)
        blocks = several(lambda: nn.Sequential(Mlp(), nn.Tanh(), Function(lambda f: norm(f))))
        found = self.step(blocks, batch(6))
        return found | {"running mean": norm.running_mean.clone(), "tracked": norm.num_batches_tracked.clone()}  # type: ignore[union-attr, operator]

    def energy_by_torch_func(self) -> Found:
        """torch.func.grad inside a block"""
        return self.step(several(lambda: Own(lambda b, x: torch.func.grad(lambda x: b.f(x).square().sum())(x))))

    def function_writes_to_its_output(self) -> Found:
        """a Function whose backward works in the memory of the output it saved"""
        return self.step(several(lambda: nn.Sequential(Mlp(), nn.Tanh(), Function(Bell.apply))))

    @undisturbed
    def dtype_changed_between(self) -> Found:
        """model.double() between forward and backward"""
        net = self.net(mlps())
        return step(net, between=net.double if self.disturbed else None)

    def threads_changed_between(self) -> Found:
        """torch.set_num_threads between forward and backward, with GroupNorm"""
        before = torch.get_num_threads()
        blocks = several(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)))
        between = lambda: torch.set_num_threads(3 - min(before, 2))  # noqa: E731
        try:
            return self.step(blocks, image(), between=between, net={"dim": 1})
        finally:
            torch.set_num_threads(before)

    def noise_behind_a_small_scale(self) -> Found:
        """NumPy's noise behind a LayerScale of 1e-6"""
        return self.step(noisy(1e-6))

    def noise_beside_large_values(self) -> Found:
        """NumPy's noise, beside |x| = 1e5"""
        return self.step(noisy(1e-3), (1e5 * batch()).detach())
