"""Parameters: frozen, shared, unused, changed at the wrong time."""

from __future__ import annotations

import torch
from hazard_blocks import WIDTH, Function, Mlp, batch, mlps
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn
from torch.func import functional_call

THEME = "parameters"


def _frozen(h: Setting, which: list[int]) -> Found:
    blocks = mlps(6)
    for k in which:
        blocks[k].requires_grad_(False)
    return step(h.net(blocks), batch())


@hazard(THEME)
def frozen_first(h: Setting) -> Found:
    """first blocks frozen, input without gradient"""
    blocks = mlps(6)
    for block in blocks[:3]:
        block.requires_grad_(False)
    return step(h.net(blocks), batch().detach())


@hazard(THEME)
def frozen_middle(h: Setting) -> Found:
    """blocks in the middle frozen"""
    return _frozen(h, [2, 3])


@hazard(THEME)
def frozen_last(h: Setting) -> Found:
    """last blocks frozen"""
    return _frozen(h, [4, 5])


@hazard(THEME)
def frozen_all(h: Setting) -> Found:
    """all blocks frozen; the gradient of the input alone"""
    return _frozen(h, list(range(6)))


@hazard(THEME)
def frozen_biases(h: Setting) -> Found:
    """every second parameter frozen"""
    blocks = mlps(6)
    for block in blocks:
        for k, p in enumerate(block.parameters()):
            p.requires_grad_(k % 2 == 0)
    return step(h.net(blocks), batch())


@hazard(THEME)
def low_rank_adapters(h: Setting) -> Found:
    """low-rank adapters on frozen weights"""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.base(x)) + self.b(self.a(x))

    return step(h.net([Adapted() for _ in range(6)]), batch().detach())


@hazard(THEME)
def input_without_gradient(h: Setting) -> Found:
    """an input that needs no gradient"""
    return step(h.net(mlps(6)), batch().detach())


@hazard(THEME)
def unused_parameters(h: Setting) -> Found:
    """parameters that forward does not use"""
    blocks = mlps(6)
    for block in blocks[::2]:
        block.unused = nn.Linear(3, 3)
    return step(h.net(blocks), batch())


@hazard(THEME)
def shared_parameter(h: Setting) -> Found:
    """one weight in several blocks"""
    blocks = mlps(6)
    for block in blocks[1::2]:
        block.inner.weight = blocks[0].inner.weight  # type: ignore[union-attr]
    return step(h.net(blocks), batch())


@hazard(THEME)
def tied_blocks(h: Setting) -> Found:
    """one block six times"""
    return step(h.net([Mlp()] * 6), batch())


@hazard(THEME)
def block_without_parameters(h: Setting) -> Found:
    """blocks without parameters among others"""
    blocks = mlps(6)
    blocks[1] = blocks[4] = Function(torch.sin)
    return step(h.net(blocks), batch())


@hazard(THEME)
def block_that_saves_nothing(h: Setting) -> Found:
    """blocks that save nothing for backward"""
    blocks = mlps(6)
    blocks[1] = blocks[4] = Function(lambda x: x * 0.5)
    return step(h.net(blocks), batch())


@hazard(THEME)
def block_returns_its_input(h: Setting) -> Found:
    """a block that returns its input itself"""
    blocks = mlps(6)
    blocks[2] = nn.Identity()
    return step(h.net(blocks), batch())


@hazard(THEME)
def block_without_gradient(h: Setting) -> Found:
    """a block whose output needs no gradient"""
    blocks = mlps(6)
    blocks[2] = Function(lambda x: torch.full_like(x, 0.1).detach())
    return step(h.net(blocks), batch())


@hazard(THEME, undisturbed=True)
def parameter_written_between(h: Setting) -> Found:
    """a parameter changed in place between forward and backward"""
    blocks = mlps(4)

    @torch.no_grad()
    def write() -> None:
        if h.disturbed:
            next(blocks[2].parameters()).mul_(0.5)

    return step(h.net(blocks), batch(), between=write)


@hazard(THEME, undisturbed=True)
def optimizer_step_between(h: Setting) -> Found:
    """optimizer.step() between forward and backward"""
    net = h.net(mlps(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    square(net(batch())).backward()
    return step(net, batch(), between=optimizer.step if h.disturbed else None)


@hazard(THEME, undisturbed=True)
def weights_loaded_between(h: Setting) -> Found:
    """load_state_dict between forward and backward"""
    net = h.net(mlps(4))
    other = {k: v * 0.5 for k, v in net.state_dict().items()}
    return step(net, batch(), between=lambda: net.load_state_dict(other) if h.disturbed else None)


@hazard(THEME, undisturbed=True)
def data_swapped_between(h: Setting) -> Found:
    """p.data = … between forward and backward, which autograd does not see"""
    blocks = mlps(4)

    def swap() -> None:
        p = next(blocks[2].parameters())
        p.data = p.data * 0.5

    return step(h.net(blocks), batch(), between=swap if h.disturbed else None)


@hazard(THEME, undisturbed=True)
def data_written_between(h: Setting) -> Found:
    """p.data.mul_(…) between forward and backward, which autograd does not see"""
    blocks = mlps(4)
    return step(
        h.net(blocks), batch(), between=lambda: next(blocks[2].parameters()).data.mul_(0.5) if h.disturbed else None
    )


@hazard(THEME)
def parameter_replaced_between(h: Setting) -> Found:
    """a parameter replaced by another between forward and backward"""
    blocks = mlps(4)
    net, x = h.net(blocks), batch()
    y, old = net(x), next(blocks[2].parameters())
    blocks[2].inner.weight = nn.Parameter(torch.zeros_like(old))  # type: ignore[union-attr]
    square(y).backward()
    return collect(net, gradient_of_the_old=torch.zeros(()) if old.grad is None else old.grad)


@hazard(THEME)
def frozen_between(h: Setting) -> Found:
    """requires_grad_(False) between forward and backward"""
    blocks = mlps(4)
    return step(h.net(blocks), batch(), between=lambda: blocks[2].requires_grad_(False))


@hazard(THEME)
def unfrozen_between(h: Setting) -> Found:
    """requires_grad_(True) between forward and backward"""
    blocks = mlps(4)
    blocks[2].requires_grad_(False)
    return step(h.net(blocks), batch(), between=lambda: blocks[2].requires_grad_(True))


@hazard(THEME, undisturbed=True)
def buffer_written_between(h: Setting) -> Found:
    """a buffer changed between forward and backward"""

    class Scaled(Mlp):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    blocks = [Scaled() for _ in range(4)]
    net, x = h.net(list(blocks)), batch()
    y = net(x)
    if h.disturbed:
        blocks[2].scale.mul_(3)
    square(y).backward()
    return {k: t for k, t in collect(net).items() if "buffer" not in k}


@hazard(THEME)
def evaluated_between(h: Setting) -> Found:
    """an evaluation in no_grad between forward and backward"""
    net = h.net([nn.Sequential(nn.BatchNorm1d(WIDTH), Mlp()) for _ in range(4)])

    @torch.no_grad()
    def evaluate() -> None:
        net.eval()
        net(batch(9) * 100)
        net.train()

    return step(net, batch(), between=evaluate)


def _optimizer_in_backward(h: Setting, blocks: list[nn.Module]) -> Found:
    net = h.net(blocks)

    @torch.no_grad()
    def update(p: Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    square(net(batch())).backward()
    return {f"gradient {k}": p.detach().clone() for k, p in enumerate(net.parameters())}


@hazard(THEME)
def optimizer_in_backward(h: Setting) -> Found:
    """optimizer in backward: a post-accumulate hook updates each weight"""
    return _optimizer_in_backward(h, mlps(6))


@hazard(THEME)
def optimizer_in_backward_tied(h: Setting) -> Found:
    """optimizer in backward, one block six times: updated once, at the end"""
    return _optimizer_in_backward(h, [Mlp()] * 6)


@hazard(THEME)
def optimizer_in_backward_nothing_saved(h: Setting) -> Found:
    """optimizer in backward, a block that saves nothing but has a parameter"""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x + self.shift

    blocks = mlps(6)
    blocks[3] = Shift()
    return _optimizer_in_backward(h, blocks)


@hazard(THEME)
def functional_parameters(h: Setting) -> Found:
    """torch.func.functional_call with other parameters"""
    net, x = h.net(mlps(4)), batch()
    swapped = {n: (p.detach() * 1.5).requires_grad_() for n, p in net.named_parameters()}
    square(functional_call(net, swapped, (x,))).backward()
    return {f"gradient {k}": torch.zeros(()) if p.grad is None else p.grad for k, p in enumerate(swapped.values())}


@hazard(THEME)
def gradient_accumulation(h: Setting) -> Found:
    """gradients accumulated over three batches"""
    net = h.net(mlps(4))
    for _ in range(2):
        square(net(batch())).backward()
    return step(net, batch())
