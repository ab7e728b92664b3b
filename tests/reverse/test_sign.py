"""γ of random sign: the recurrence it computes, the plain network it is in evaluation, and the signs it draws.

That no memory mode changes a bit of it is among the conditions of `test_contract`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Attention, Mlp, assert_same_bits, conv, same_in_every_mode, train_step
from retrograde.convert.convert import stages_of
from retrograde.extras import require
from retrograde.nets.resnet import resnet

FORMS = ("branch", "block", "relu")
SIGN = rg.RandomSign(1 / 16)


def signs_of(net: rg.MomentumNet, x: Tensor, seed: int) -> Tensor:
    """The signs that a pass draws: block × sample."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return net.encode(x).held.gradient.signs.flatten(1).double()


def f_of(form: str, block: nn.Module, x: Tensor) -> Tensor:
    y = block(x)
    return y if form == "branch" else (y if form == "block" else torch.relu(x + y)) - x


def plain(form: str, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x) if form == "block" else torch.relu(x + block(x)) if form == "relu" else x + block(x)
    return x


@pytest.mark.parametrize("gamma", [1 / 2, 1 / 16, 9 / 10])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_recurrence_of_exact_bit_level_reversible_transformers(form: str, gamma: float) -> None:
    """x_{k+1} = γ·x_{k−1} + (1 − γ)·x_k + (1 + γ)·f(x_k), γ = ±1/2 per sample and block [zhang2024]; its gradients by autograd."""
    net = rg.MomentumNet([Mlp() for _ in range(12)], rg.RandomSign(gamma), form=form, memory="reverse").double()
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    theirs = -gamma * signs_of(net, x, seed=3)[:, :, None]
    before, now = x, x  # v₀ = 0
    for block, g in zip(net.blocks, theirs, strict=True):
        before, now = now, g * before + (1 - g) * now + (1 + g) * f_of(form, block, now)
    wanted = [now, *torch.autograd.grad(now.square().sum(), [x, *net.parameters()])]
    torch.manual_seed(3)
    y = net(x)
    found = [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]
    assert set(theirs.unique().tolist()) == {-gamma, gamma}
    assert all((a - b).norm() <= 1e-10 * b.norm() for a, b in zip(found, wanted, strict=True))


def test_on_average_over_signs_a_step_is_the_plain_one() -> None:
    net, x, found = rg.MomentumNet([Mlp()], rg.RandomSign(0.5)).double(), torch.randn(2, 8).double(), {}
    for seed in range(20):
        for sign, x0, x1 in zip(signs_of(net, x, seed)[0], x, _seeded(net, x, seed), strict=True):
            found[float(sign), float(x0[0])] = x1
    for x0, wanted in zip(x, x + net.blocks[0](x), strict=True):
        mean = (found[1.0, float(x0[0])] + found[-1.0, float(x0[0])]) / 2
        assert (mean - wanted).norm() <= 1e-12 * wanted.norm()


def _seeded(net: nn.Module, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return net(x).detach()


def test_every_sample_of_every_block_draws_and_every_pass_anew() -> None:
    net, x = rg.MomentumNet([nn.Linear(3, 3) for _ in range(50)], SIGN), torch.randn(40, 3)
    first, again, other = (signs_of(net, x, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert first.shape == (50, 40)
    assert set(first.unique().tolist()) == {-1.0, 1.0}
    assert not torch.equal(first, other)
    for signs in (first, other):
        assert signs.mean().abs() < 4 / 2000**0.5
        assert (signs @ signs.T).fill_diagonal_(0).abs().max() < 40  # no two blocks alike
        assert (signs.T @ signs).fill_diagonal_(0).abs().max() < 50  # no two samples alike
    torch.manual_seed(0)
    assert not torch.equal(net(x), net(x))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store", "auto", 10**9])
@pytest.mark.parametrize("form", FORMS)
def test_evaluation_is_the_plain_network(form: str, memory: Any) -> None:
    """Its outputs and gradients; no random number is drawn."""
    blocks = [conv() for _ in range(5)]
    for block in blocks:
        block[2].inplace = False
    net = rg.MomentumNet(blocks, SIGN, form=form, memory=memory, velocity="first").eval()
    x = torch.randn(2, 4, 5, 5)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    torch.manual_seed(0)
    y = net(leaves[0])
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    y.square().mean().backward()
    wanted = plain(form, blocks, leaves[1])
    wanted.square().mean().backward()
    assert torch.equal(y, wanted)
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    with torch.no_grad():
        assert torch.equal(net(x), wanted)
        assert not torch.equal(net.train()(x), wanted)


def test_the_inverse_is_exact_and_one_bit_a_layer_is_kept_at_one_half() -> None:
    net, x = rg.MomentumNet([Mlp() for _ in range(21)], rg.RandomSign(0.5)), torch.randn(3, 8)
    with torch.no_grad():
        net(x)
        torch.manual_seed(1)
        first = net.fixed_point
        state = net.encode(x)
        back = net.inverse(state)
        assert sum(b.nbytes for b in state.held.buffers.values()) == 3 * x.numel()
        assert torch.equal(back, first.decode(first.encode(x), x.dtype))
        with pytest.raises(ValueError, match=r"call \.train\(\) first"):
            net.eval().encode(x)


@pytest.mark.parametrize("form", FORMS)
def test_what_leaves_16_bits_is_rewound_all_the_same(form: str) -> None:
    """The least integer is its own negative."""
    fixed = rg.FixedPoint(6, torch.int16)
    blocks = [nn.Linear(8, 8) for _ in range(8)]
    net = rg.MomentumNet(blocks, SIGN, form=form, memory="reverse", fixed_point=fixed, overflow="nan", verify="strict")
    y = net(torch.randn(3, 8) * 1e4)
    assert y.isnan().all()
    y.sum().backward()


# converted models --------------------------------------------------------------------------------------------------------


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False), torch.randn(3, 4, 8)


def residual() -> tuple[nn.Module, Tensor]:
    block = require("torchvision.models").resnet.BasicBlock
    return nn.Sequential(*[block(4, 4) for _ in range(4)]), torch.randn(3, 4, 5, 5)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def branches() -> tuple[nn.Module, Tensor]:
    return Sum(), torch.randn(3, 4, 8)


@pytest.mark.parametrize("make", [encoder, residual, branches])
def test_a_converted_model(make: Any) -> None:
    """Every memory mode gives the bits of stored tensors in training; in evaluation the model is as it was."""
    model, x = make()
    unconverted = copy.deepcopy(model).eval()
    found = {}
    for memory in ("store", "reverse", "checkpoint", 10**9):
        converted = rg.convert(copy.deepcopy(model), x, gamma=SIGN, memory=memory)
        assert stages_of(converted)[0].gamma == SIGN
        found[memory] = train_step(converted, x.clone().requires_grad_())
        converted.eval()
        for seen in (True, False):
            with torch.set_grad_enabled(seen):
                assert torch.equal(converted(x), unconverted(x))
        assert_same_bits(
            train_step(converted, x.clone().requires_grad_()), train_step(unconverted, x.clone().requires_grad_())
        )
        assert not torch.equal(found[memory]["output"], train_step(rg.revert(converted).train(), x)["output"])
        assert_same_bits(found["store"], found[memory])


def test_blocks_that_are_evaluated_inside_of_a_stage_that_is_trained() -> None:
    """The first blocks, frozen and in evaluation, are plain; a block in the middle goes on with the pass."""
    model, x = encoder()
    rg.convert(model, gamma=SIGN, memory="reverse")
    unconverted = rg.revert(copy.deepcopy(model))
    model.layers[0].eval()
    model.layers[3].eval()
    with pytest.warns(UserWarning, match="velocity starts from 0 again"):
        y = model(x)
    y.sum().backward()
    assert torch.equal(model.layers[0](x), unconverted.layers[0].eval()(x))
    assert all(p.grad is not None for p in model.parameters())


def test_a_residual_network_of_our_own() -> None:
    ours, theirs = (resnet(18, size="cifar", classes=3, gamma=g) for g in (SIGN, None))
    theirs.load_state_dict(ours.state_dict())
    x, found = torch.randn(2, 3, 8, 8), []
    for memory in ("store", "reverse"):
        for stage in ours.stages():
            stage.momentum.memory = memory
        found.append(train_step(ours, x))
    assert_same_bits(*found)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_a_plan_and_a_budget() -> None:
    model, x = encoder()
    plan = rg.plan(model.eval(), x, gamma=SIGN)
    assert "RandomSign(1/16)" in str(plan)
    assert plan.stages[0].mode == "reverse"
    net, x = rg.MomentumNet([Mlp() for _ in range(9)], SIGN), torch.randn(64, 8)
    wanted = same_in_every_mode(net, x)
    net.memory = 45_000
    assert_same_bits(train_step(net, x), wanted)
    net(x)
    assert 0 < net.plan.replayed < 9


# what is given ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0, 1, -0.5, 2.0, [0.5, 0], float("nan")])
def test_magnitudes_that_are_not_between_0_and_1(gamma: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomSign takes|must lie in \[0, 1\]"):
        rg.RandomSign(gamma)


def test_what_else_is_refused() -> None:
    blocks = [Mlp(), Mlp()]
    for wrong in (lambda: rg.RandomSign("a"), lambda: rg.MomentumNet(blocks, [SIGN, 0.9])):
        with pytest.raises(TypeError, match="gamma must be a number"):
            wrong()
    with pytest.raises(ValueError, match="3 values for 2 blocks"):
        rg.MomentumNet(blocks, rg.RandomSign([0.1, 0.2, 0.3]))
    with pytest.raises(ValueError, match="Leave the schedule out"):
        rg.GammaSchedule(rg.convert(encoder()[0], gamma=SIGN), {0: 0, 3: 1})


def test_gamma_may_be_set_and_is_shown_and_travels() -> None:
    net = rg.MomentumNet([Mlp(), Mlp()], 0.9)
    net.gamma = SIGN
    assert net.gamma == SIGN == rg.RandomSign(torch.tensor(1 / 16))
    assert "gamma=RandomSign(1/16)" in repr(net)
    assert pickle.loads(pickle.dumps(net)).gamma == copy.deepcopy(net).gamma == SIGN
    net.gamma = rg.RandomSign([1 / 2, 1 / 8])
    assert repr(net.gamma) == "RandomSign([1/2, 1/8])"
    net.gamma = 0.5
    assert net.gamma == 0.5
