"""Parameters: frozen, shared, unused, changed at the wrong time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hazard_blocks import WIDTH, Function, Mlp, Own, batch, mlps, several
from hazard_registry import Found, Theme, collect, given, listed, square, step, undisturbed
from torch import Tensor, nn
from torch.func import functional_call


def frozen(h: Theme, which: Sequence[int], x: Tensor | None = None) -> Found:
    blocks = mlps(6)
    for k in which:
        blocks[k].requires_grad_(False)
    return h.step(blocks, x)


def with_blocks(h: Theme, **others: nn.Module) -> Found:
    """A step of six blocks, some of which are others."""
    blocks = mlps(6)
    for name, block in others.items():
        blocks[int(name.removeprefix("at"))] = block
    return h.step(blocks)


def between(h: Theme, change: Callable[[Any], Any]) -> Found:
    """A step of four blocks with something done to the first weight of block 2 between forward and backward."""
    blocks = mlps()
    return h.step(blocks, between=lambda: change(next(blocks[2].parameters())) if h.disturbed else None)


def optimizer_inside(h: Theme, blocks: list[nn.Module]) -> Found:
    """What parameters become where each is updated as soon as it has its gradient."""
    net = h.net(blocks)

    @torch.no_grad()
    def update(p: Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    square(net(batch())).backward()
    return listed(p.detach().clone() for p in net.parameters())


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + self.b(self.a(x))


class Shift(nn.Module):
    """Saves nothing but has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + self.shift


def swap(p: Tensor) -> None:
    p.data = p.data * 0.5


class Parameters(Theme):
    theme = "parameters"

    def frozen_first(self) -> Found:
        """first blocks frozen, input without gradient"""
        return frozen(self, range(3), batch().detach())

    def frozen_middle(self) -> Found:
        """blocks in the middle frozen"""
        return frozen(self, [2, 3])

    def frozen_last(self) -> Found:
        """last blocks frozen"""
        return frozen(self, [4, 5])

    def frozen_all(self) -> Found:
        """all blocks frozen; the gradient of the input alone"""
        return frozen(self, range(6))

    def frozen_biases(self) -> Found:
        """every second parameter frozen"""
        blocks = mlps(6)
        for block in blocks:
            for k, p in enumerate(block.parameters()):
                p.requires_grad_(k % 2 == 0)
        return self.step(blocks)

    def low_rank_adapters(self) -> Found:
        """low-rank adapters on frozen weights"""
        return self.step(several(Adapted, 6), batch().detach())

    def input_without_gradient(self) -> Found:
        """an input that needs no gradient"""
        return self.step(mlps(6), batch().detach())

    def unused_parameters(self) -> Found:
        """parameters that forward does not use"""
        blocks = mlps(6)
        for block in blocks[::2]:
            block.unused = nn.Linear(3, 3)
        return self.step(blocks)

    def shared_parameter(self) -> Found:
        """one weight in several blocks"""
        blocks = mlps(6)
        for block in blocks[1::2]:
            block.inner.weight = blocks[0].inner.weight
        return self.step(blocks)

    def tied_blocks(self) -> Found:
        """one block six times"""
        return self.step([Mlp()] * 6)

    def block_without_parameters(self) -> Found:
        """blocks without parameters among others"""
        return with_blocks(self, at1=Function(torch.sin), at4=Function(torch.sin))

    def block_that_saves_nothing(self) -> Found:
        """blocks that save nothing for backward"""
        return with_blocks(self, at1=Function(lambda x: x * 0.5), at4=Function(lambda x: x * 0.5))

    def block_returns_its_input(self) -> Found:
        """a block that returns its input itself"""
        return with_blocks(self, at2=nn.Identity())

    def block_without_gradient(self) -> Found:
        """a block whose output needs no gradient"""
        return with_blocks(self, at2=Function(lambda x: torch.full_like(x, 0.1).detach()))

    @undisturbed
    def parameter_written_between(self) -> Found:
        """a parameter changed in place between forward and backward"""
        return between(self, lambda p: torch.no_grad()(p.mul_)(0.5))

    @undisturbed
    def optimizer_step_between(self) -> Found:
        """optimizer.step() between forward and backward"""
        net = self.net(mlps())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        square(net(batch())).backward()
        return step(net, between=optimizer.step if self.disturbed else None)

    @undisturbed
    def weights_loaded_between(self) -> Found:
        """load_state_dict between forward and backward"""
        net = self.net(mlps())
        other = {k: v * 0.5 for k, v in net.state_dict().items()}
        return step(net, between=lambda: net.load_state_dict(other) if self.disturbed else None)

    @undisturbed
    def data_swapped_between(self) -> Found:
        """p.data = … between forward and backward, which autograd does not see"""
        return between(self, swap)

    @undisturbed
    def data_written_between(self) -> Found:
        """p.data.mul_(…) between forward and backward, which autograd does not see"""
        return between(self, lambda p: p.data.mul_(0.5))

    def parameter_replaced_between(self) -> Found:
        """a parameter replaced by another between forward and backward"""
        blocks = mlps()
        net, x = self.net(blocks), batch()
        y, old = net(x), blocks[2].inner.weight
        blocks[2].inner.weight = nn.Parameter(torch.zeros_like(old))
        square(y).backward()
        return collect(net, gradient_of_the_old=given(old))

    def frozen_between(self) -> Found:
        """requires_grad_(False) between forward and backward"""
        blocks = mlps()
        return self.step(blocks, between=lambda: blocks[2].requires_grad_(False))

    def unfrozen_between(self) -> Found:
        """requires_grad_(True) between forward and backward"""
        blocks = mlps()
        blocks[2].requires_grad_(False)
        return self.step(blocks, between=lambda: blocks[2].requires_grad_(True))

    @undisturbed
    def buffer_written_between(self) -> Found:
        """a buffer changed between forward and backward"""
        blocks = several(lambda: Own(lambda block, x: block.f(x) * block.scale, scale=torch.ones(WIDTH)))
        found = self.step(blocks, between=lambda: blocks[2].scale.mul_(3) if self.disturbed else None)
        return {name: t for name, t in found.items() if not name.startswith("scale")}

    def evaluated_between(self) -> Found:
        """an evaluation in no_grad between forward and backward"""
        net = self.net(several(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Mlp())))

        @torch.no_grad()
        def evaluate() -> None:
            net.eval()
            net(batch(9) * 100)
            net.train()

        return step(net, between=evaluate)

    def optimizer_in_backward(self) -> Found:
        """optimizer in backward: a post-accumulate hook updates each weight"""
        return optimizer_inside(self, mlps(6))

    def optimizer_in_backward_tied(self) -> Found:
        """optimizer in backward, one block six times: updated once, at the end"""
        return optimizer_inside(self, [Mlp()] * 6)

    def optimizer_in_backward_nothing_saved(self) -> Found:
        """optimizer in backward, a block that saves nothing but has a parameter"""
        blocks = mlps(6)
        blocks[3] = Shift()
        return optimizer_inside(self, blocks)

    def functional_parameters(self) -> Found:
        """torch.func.functional_call with other parameters"""
        net, x = self.net(mlps()), batch()
        swapped = {n: (p.detach() * 1.5).requires_grad_() for n, p in net.named_parameters()}
        square(functional_call(net, swapped, (x,))).backward()
        return listed(map(given, swapped.values()))

    def gradient_accumulation(self) -> Found:
        """gradients accumulated over three batches"""
        net = self.net(mlps())
        for _ in range(2):
            square(net(batch())).backward()
        return step(net)
