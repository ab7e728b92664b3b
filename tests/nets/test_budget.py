"""A budget: as many blocks as fit keep their tensors, and no bit changes."""

import copy
import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import retrograde as rg
from problems import Attention, Mlp, assert_same_bits, conv, same_in_every_mode, train_step
from retrograde.measure import held_bytes
from retrograde.stack.momentum import Recurrence
from retrograde.stack.planner import Weights, within

CASES = {
    "mlp": (lambda: [Mlp(32, 48) for _ in range(12)], (256, 32)),
    "conv+batchnorm": (lambda: [conv(8) for _ in range(10)], (8, 8, 12, 12)),
    "attention+dropout": (lambda: [Attention(16) for _ in range(8)], (8, 20, 16)),
}


def budgeted(kind: str, **options: object) -> tuple[rg.MomentumNet, Tensor]:
    """A network that has seen one batch, and the batch."""
    make, shape = CASES[kind]
    net, x = rg.MomentumNet(make(), fraction_bits=20, **options), torch.randn(shape)
    if net.budget is not None:
        net(x).sum().backward()
        net.zero_grad()
    return net, x


def held(net: rg.MomentumNet, x: Tensor) -> int:
    return held_bytes(lambda: net(x).sum())


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("velocity", [None, "first"])
def test_sweep(kind: str, velocity: str | None) -> None:
    """From the least to more than plain autograd holds: within the budget, as predicted, less and less run again, same bits."""
    net, x = budgeted(kind, form="block", velocity=velocity, budget=10**9)
    everything, bits = held(net, x), None
    assert net.plan.stored == len(net.blocks)
    assert net.plan.bytes == pytest.approx(everything, rel=0.05)
    net.budget = None
    least = held(net, x)
    before, cost = 0, math.inf
    for budget in torch.linspace(least * 1.02, everything * 1.1, 12).int().tolist():
        net.budget = budget
        net(x)  # measures
        now, plan = held(net, x), net.plan
        assert now <= budget * 1.001
        assert now == pytest.approx(plan.bytes, rel=0.05)
        assert plan.cost <= cost
        assert now >= before * 0.99
        before, cost = now, plan.cost
        found = train_step(net, x.requires_grad_())
        bits = bits or found
        assert_same_bits(
            {n: t for n, t in bits.items() if "buffer" not in n}, {n: t for n, t in found.items() if "buffer" not in n}
        )
    assert cost == 0


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("form", ["branch", "block"])
def test_same_bits_as_stored(kind: str, form: str) -> None:
    net, x = budgeted(kind, form=form, verify="blocks")
    expected = same_in_every_mode(net, x.requires_grad_())
    net.memory = "auto"
    net.budget = 10**9
    net(x)
    for share in (0.3, 0.6, 0.9):
        other = copy.deepcopy(net)
        other.load_state_dict(net.state_dict())
        other.budget = int(sum(next(iter(net._planner.weights.values())).stored.values()) * share)
        other._planner.weights = net._planner.weights
        found = train_step(other, x)
        assert {n: t for n, t in found.items() if "buffer" not in n}.keys() <= expected.keys()
        for name, value in found.items():
            assert "buffer" in name or torch.equal(value, expected[name]), name


def test_only_the_lower_blocks_are_run_again() -> None:
    net, x = budgeted("mlp", budget=10**9)
    weights = net._planner.weights
    runs: list[int] = []
    for k, block in enumerate(net.blocks):
        block.register_forward_pre_hook(lambda *_, k=k: runs.append(k))
    kept = next(iter(weights.values())).stored
    net.budget = 256 * 32 * (4 + 4 + 1) + sum(kept[k] for k in (9, 10, 11))
    net._planner.weights = weights
    net(x).sum().backward()
    assert net.plan.stored == 3
    assert net.plan.mode == "reverse"
    assert runs == [*range(12), *range(8, -1, -1)]


def test_top_blocks_over_kept_inputs_at_gamma_zero() -> None:
    blocks = [Mlp(32, 48) for _ in range(6)]
    x = torch.randn(64, 32, requires_grad=True)
    grads = []
    for budget in (None, 64 * 32 * 4 * 10, 10**9):
        net = rg.MomentumNet(blocks, gamma=0, memory="auto", budget=budget)
        net(x)
        y = net(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]))
    assert net.plan.stored == 6
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_retain_graph_second_order_and_encode() -> None:
    net, x = budgeted("mlp", budget=256 * 32 * 60)
    reference = rg.MomentumNet(copy.deepcopy(net.blocks), memory="store", fraction_bits=20)
    found = []
    for n in (net, reference):
        leaf = x.clone().requires_grad_()
        n(leaf)  # measures
        y = n(leaf).square().sum()
        (once,) = torch.autograd.grad(y, leaf, retain_graph=True)
        (twice,) = torch.autograd.grad(y, leaf, create_graph=True)
        found.append([once, twice.detach(), *torch.autograd.grad(twice.square().sum(), [leaf, *n.parameters()])])
    assert 0 < net.plan.stored < 12
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    state = net.encode(x)
    assert torch.equal(net.inverse(state), state.fixed.decode(state.fixed.encode(x), x.dtype))


def test_kinds_of_input_are_measured_apart() -> None:
    net, x = budgeted("mlp", budget=256 * 32 * 60)
    net(x)
    stored = net.plan.stored
    assert stored
    net(x[:64])
    assert net.plan.stored == 0
    net(x[:64])
    assert net.plan.stored > stored
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)
        assert net.plan.stored == 0
        now = held(net, x)
        assert now <= net.plan.bytes * 1.05 + sum(p.numel() * 2 for p in net.parameters())
    net.blocks[11].requires_grad_(False)
    net(x)
    assert net.plan.stored == 0


def test_a_fraction_of_the_device() -> None:
    net, x = budgeted("mlp", budget=0.5)
    net(x)
    assert net.plan.stored == 12


def test_too_small_a_budget_says_what_is_needed() -> None:
    net, x = budgeted("mlp", budget=100)
    with pytest.raises(ValueError, match=r"budget = 100 bytes is not enough .* the least .* is 73728"):
        net(x)


@pytest.mark.parametrize("wrong", [-1, 0.0, 1.5, True, "1GB"])
def test_wrong_budgets(wrong: object) -> None:
    with pytest.raises(ValueError, match="budget must be"):
        rg.MomentumNet([Mlp()], budget=wrong)


def test_a_budget_needs_auto() -> None:
    with pytest.raises(ValueError, match="a budget is for memory='auto'"):
        rg.MomentumNet([Mlp()], memory="reverse", budget=10)
    net = rg.MomentumNet([Mlp()], budget=10**6)
    with pytest.raises(ValueError, match="a budget is for memory='auto'"):
        net.memory = "store"
    net.budget = None
    net.memory = "store"


def test_copies_keep_the_budget() -> None:
    net, x = budgeted("mlp", budget=256 * 32 * 60)
    other = copy.deepcopy(net)
    assert other.budget == net.budget
    assert torch.equal(other(x), net(x))


def test_plans_get_quicker_and_larger_with_the_budget() -> None:
    recurrence, x = Recurrence((Fraction(9, 10),) * 24, residual=True), torch.empty(1000)
    weights = Weights()
    weights.stored = dict.fromkeys(range(24), 30_000)
    plans = [within(budget, recurrence, x, weights, "off") for budget in range(10_000, 800_000, 5_000)]
    for a, b in pairwise(plans):
        assert b.cost <= a.cost
        assert b.bytes >= a.bytes
    assert plans[0].stored == 0
    assert plans[-1].replayed == 0
