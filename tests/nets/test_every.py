"""One momentum step for several blocks: fewer steps, the same parameters, bits in every mode."""

import copy

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import KINDS, Mlp, same_in_every_mode, stack


def composed(blocks: list[nn.Module], form: str) -> nn.Module:
    """Several blocks as one module that computes x + f(x)."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(blocks)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x) if form == "block" else torch.relu(x + part(x)) if form == "relu" else x + part(x)
            return x

    return One()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("velocity", [None, "first"])
def test_bits_in_every_mode(kind: str, form: str, velocity: str | None) -> None:
    blocks, x = stack(kind, 11)
    net = rg.MomentumNet(blocks, form=form, velocity=velocity, every=3, verify="blocks")
    same_in_every_mode(net, x.requires_grad_())
    assert len(net.recurrence.gammas) == 4


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
def test_it_is_the_network_of_composed_blocks(form: str) -> None:
    blocks, x = stack("mlp", 8)
    net = rg.MomentumNet(blocks, form=form, every=2, memory="reverse", fraction_bits=22)
    groups = [composed(blocks[k : k + 2], form) for k in range(0, 8, 2)]
    other = rg.MomentumNet(groups, form="block", memory="store", fraction_bits=22)
    grads = [torch.autograd.grad(n(x).square().sum(), list(net.parameters())) for n in (net, other)]
    assert torch.equal(net(x), other(x))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_the_state_dict_is_that_of_the_blocks() -> None:
    blocks, x = stack("conv+batchnorm", 5)
    net, plain = (rg.MomentumNet(copy.deepcopy(blocks), every=e, fraction_bits=20) for e in (2, 1))
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in net.named_modules()] == [n for n, _ in plain.named_modules()]
    copied = copy.deepcopy(net)
    net.eval(), copied.eval()
    assert torch.equal(copied(x), net(x))
    with torch.no_grad():
        next(copied.parameters()).add_(1)
    assert not torch.equal(copied(x), net(x))


def test_inverse() -> None:
    blocks, x = stack("mlp", 7)
    net = rg.MomentumNet(blocks, every=2)
    state = net.encode(x)
    assert torch.equal(net.inverse(state), state.fixed.decode(state.fixed.encode(x), x.dtype))


def test_replaced_blocks_are_seen() -> None:
    blocks, x = stack("mlp", 4)
    net = rg.MomentumNet(blocks, every=2, fraction_bits=20)
    before = net(x)
    net.blocks[3] = Mlp()
    assert not torch.equal(net(x), before)
    net(x).sum().backward()
    assert net.blocks[3].inner.weight.grad.any()


def test_one_gamma_per_group_and_a_budget() -> None:
    blocks, x = stack("mlp", 6)
    net = rg.MomentumNet(blocks, gamma=[0.5, 0.9, 0.75], every=2, memory=10**7, fraction_bits=20)
    net(x).sum().backward()
    net(x).sum().backward()
    assert net.plan.stored == net.plan.depth == 3
    with pytest.raises(ValueError, match="6 values for 3 blocks"):
        net.gamma = [0.9] * 6


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_wrong_values(wrong: object) -> None:
    with pytest.raises(ValueError, match="every must be a whole number"):
        rg.MomentumNet([Mlp()] * 4, every=wrong)
