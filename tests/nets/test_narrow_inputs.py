"""With 16-bit state, inputs that are kept are kept as integers: half the bytes, the same bits, whatever is done with the graph."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Attention, Mlp, assert_same_bits, conv, train_step
from retrograde.memory import peak_memory, schedule
from retrograde.memory.budget import Step
from retrograde.memory.modes import MemoryPlan, holding, leanest
from retrograde.memory.schedule import RESERVE, Choice, chain
from retrograde.stack.kept import Held

MIXED = [MemoryPlan(0, 8, 0), MemoryPlan(3, 5, 0), MemoryPlan(2, 3, 3), MemoryPlan(0, 4, 4), MemoryPlan(7, 1, 0)]
"""Of eight blocks: all kept, or some."""


def planned(net: rg.MomentumNet, plan: MemoryPlan) -> rg.MomentumNet:
    """The network with a plan of our choice."""
    net = copy.deepcopy(net)
    net._stack.planned = plan
    return net


class Cast(nn.Module):
    """A network under autocast, in a way that can be copied."""

    def __init__(self, net: rg.MomentumNet, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            return self.net(x)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What is kept of blocks as integers."""
    found: list[Tensor] = []
    original = Held.hold_integers

    def hold_integers(self: Held, state: Any) -> None:
        original(self, state)
        found.append(self.x)

    monkeypatch.setattr(Held, "hold_integers", hold_integers)
    return found


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (3, 8)),
    "conv+batchnorm": (conv, (2, 4, 5, 5)),
    "attention+dropout": (Attention, (2, 5, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("form", "velocity"), [("block", "first"), ("branch", "first"), ("branch", None), ("relu", None)]
)
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("verify", ["auto", "off"])
def test_no_bit_differs_from_stored_blocks(
    kind: str, form: str, velocity: str | None, amp: torch.dtype | None, verify: str, held: list[Tensor]
) -> None:
    make, shape = KINDS[kind]
    net = rg.MomentumNet([make() for _ in range(8)], form=form, velocity=velocity, state_bits=16, verify=verify)
    x = torch.randn(shape, requires_grad=True)
    if len(shape) == 4:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = train_step(Cast(planned(net, MemoryPlan(0, 0, 8)), amp), x)
    assert not held
    for plan in MIXED:
        held.clear()
        assert_same_bits(expected, train_step(Cast(planned(net, plan), amp), x))
        assert len(held) == plan.kept + (velocity == "first" and not plan.reversed)
        assert all(q.dtype == torch.int16 and q.stride() == x.stride() for q in held)


@pytest.mark.parametrize("verify", ["end", "blocks"])
def test_replays_are_checked(verify: str) -> None:
    """A block that does not repeat itself is found, with its input kept as integers; one that does is not."""

    class Moody(Mlp):
        moody = False

        def forward(self, x: Tensor) -> Tensor:
            if self.moody and torch._C._current_graph_task_id() != -1:
                x = x + 0.25
            return super().forward(x)

    net = rg.MomentumNet([Moody() for _ in range(8)], state_bits=16, verify=verify)
    x = torch.randn(3, 8)
    expected = train_step(planned(net, MemoryPlan(0, 0, 8)), x)
    for plan in MIXED:
        assert_same_bits(expected, train_step(planned(net, plan), x))
    net.blocks[7].moody = True
    for plan in (MemoryPlan(0, 8, 0), MemoryPlan(3, 5, 0)):
        with pytest.raises(rg.ReplayError, match="block 7 did not repeat itself"):
            train_step(planned(net, plan), x)


def test_twice_through_the_graph_and_of_second_order() -> None:
    net, found = rg.MomentumNet([Mlp() for _ in range(8)], state_bits=16), []
    x = torch.randn(3, 8)
    for plan in (MemoryPlan(0, 0, 8), *MIXED):
        other, leaf = planned(net, plan), x.clone().requires_grad_()
        y = other(leaf).square().sum()
        once = torch.autograd.grad(y, [leaf, *other.parameters()], retain_graph=True)
        again = torch.autograd.grad(y, [leaf, *other.parameters()], retain_graph=True)
        (twice,) = torch.autograd.grad(y, leaf, create_graph=True)
        found.append(
            [*once, *again, twice.detach(), *torch.autograd.grad(twice.square().sum(), list(other.parameters()))]
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_block_that_writes_to_its_input() -> None:
    class Writes(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5))

    net, x = rg.MomentumNet([Writes() for _ in range(8)], state_bits=16), torch.randn(3, 8)
    expected = train_step(planned(net, MemoryPlan(0, 0, 8)), x)
    for plan in MIXED:
        assert_same_bits(expected, train_step(planned(net, plan), x))


def test_an_input_that_others_change_is_found_again() -> None:
    """As a float it is the block's own, and the change is an error; the integers are a copy."""

    def gradients(state_bits: int | str, change: bool) -> list[Tensor]:
        inputs: list[Tensor] = []
        torch.manual_seed(0)
        net = rg.MomentumNet([Mlp() for _ in range(4)], memory="checkpoint", state_bits=state_bits)
        net(torch.ones(3, 8))
        net.blocks[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        y = net(torch.ones(3, 8)).sum()
        if change:
            inputs[0].detach().zero_()
        return list(torch.autograd.grad(y, list(net.parameters())))

    assert all(map(torch.equal, gradients(16, change=False), gradients(16, change=True)))
    with pytest.raises(rg.ReplayError, match="the input of block 2, kept for its backward pass, was changed"):
        gradients("auto", change=True)


@pytest.mark.parametrize(
    ("dtype", "state_bits"),
    [(torch.bfloat16, 16), (torch.float16, 16), (torch.float32, "auto"), (torch.float64, "auto")],
)
def test_integers_that_are_no_narrower_are_not_kept(dtype: torch.dtype, state_bits: Any, held: list[Tensor]) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(8)], memory="checkpoint", state_bits=state_bits).to(dtype)
    net(torch.randn(3, 8, dtype=dtype)).sum().backward()
    assert not held
    assert holding(net.recurrence, dtype)["checkpoint"] == 8 * dtype.itemsize


def test_no_integers_at_gamma_zero(held: list[Tensor]) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(8)], gamma=0, memory="checkpoint", state_bits=16)
    net(torch.randn(3, 8)).sum().backward()
    assert not held
    assert holding(net.recurrence, torch.float32) == {"checkpoint": 32}


def test_frozen_blocks_keep_nothing(held: list[Tensor]) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(8)], memory="checkpoint", state_bits=16)
    for block in net.blocks[:5]:
        block.requires_grad_(False)
    net(torch.randn(3, 8)).sum().backward()
    assert len(held) == 3


def test_integers_go_with_the_graph(held: list[Tensor]) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(8)], memory="checkpoint", state_bits=16)
    y = net(torch.randn(3, 8)).sum()
    alive = [weakref.ref(q) for q in held]
    held.clear()
    gc.collect()
    assert len(alive) == 8
    assert all(q() is not None for q in alive)
    y.backward(retain_graph=True)
    assert all(q() is not None for q in alive)
    y.backward()
    assert all(q() is None for q in alive)


def held_bytes(net: nn.Module, x: Tensor) -> int:
    """Between forward and backward."""
    net(x)
    return peak_memory(lambda: net(x).square().mean(), lambda loss: loss.backward()).held


def test_half_is_held() -> None:
    """Two bytes more for each element and block, where floats take four."""
    for state_bits, each in ((16, 2), ("auto", 4)):
        sizes = []
        for depth in (8, 24):
            net = rg.MomentumNet([Mlp(64, 64) for _ in range(depth)], memory="checkpoint", state_bits=state_bits)
            sizes.append(held_bytes(net, torch.randn(512, 64)))
        assert (sizes[1] - sizes[0]) / (16 * 512 * 64) == pytest.approx(each, rel=0.02)


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 2, 128, 0.0, batch_first=True, norm_first=True)


SWEPT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, dict[str, Any]]] = {
    "mlp": (lambda: Mlp(32, 96), (512, 32), 12, {"form": "block"}),
    "conv+batchnorm": (lambda: conv(8), (8, 8, 12, 12), 10, {"form": "relu"}),
    "transformer": (layer, (4, 24, 32), 6, {"velocity": "first"}),
    "few": (lambda: Mlp(32, 48), (512, 32), 4, {"velocity": "first"}),  # the leanest keeps inputs
}


def observed(net: rg.MomentumNet, x: Tensor, plan: MemoryPlan) -> Step:
    """A step by this plan without values."""
    return net._scheduler.step(net, [net._stack], (x,), {}, {"network": plan})


def links_of(net: rg.MomentumNet, x: Tensor) -> list[Choice]:
    step = observed(net, x, leanest(net.recurrence, x.dtype))
    return chain(step.usage, list(step.tracks.values()))


@pytest.mark.parametrize("kind", SWEPT)
@pytest.mark.parametrize("amp", [False, True])
def test_every_plan_takes_what_is_predicted(kind: str, amp: bool) -> None:
    """By a step without values, run by that plan; and the chain gets quicker link by link."""
    make, shape, depth, options = SWEPT[kind]
    net = rg.MomentumNet([make() for _ in range(depth)], state_bits=16, **options)
    x = torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        links = links_of(net, x)
        for a, b in pairwise(links):
            assert b.cost < a.cost
        for link in links[:: 1 if kind == "few" else 4]:
            needed = max(observed(net, x, link.plans[0]).usage)
            assert needed <= link.peak * (1 + RESERVE)
            assert link.peak <= needed * (
                1.16 if amp else 1.1
            )  # products of a replay, which a stored block does not have
    assert any(link.plans[0].kept for link in links)
    assert links[-1].plans == (MemoryPlan(0, 0, depth),)


@pytest.mark.parametrize("widest", [0, 5])
def test_the_float_at_hand_is_counted_beside_the_integers(widest: int) -> None:
    """Where the block that sets the peak keeps its input. A block that is reversed has its output there instead, save the first."""
    net = rg.MomentumNet([Mlp(32, 512 if k == widest else 64) for k in range(6)], state_bits=16)
    x = torch.randn(512, 32)
    step = observed(net, x, MemoryPlan(6, 0, 0))
    (track,) = step.tracks.values()
    now, plan = torch.tensor(step.usage), MemoryPlan(6, 0, 0)
    for r in range(5, -1, -1):
        before, plan = plan, MemoryPlan(r, 6 - r, 0)
        for start, end, more in track.changes(before, plan, r):
            now[start : max(start, end)] += more
        needed = max(observed(net, x, plan).usage)
        assert needed <= int(now.max()) <= needed + 0.6 * x.nbytes


def test_a_budget_keeps_twice_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As against floats: what is there is kept, and not a byte more."""
    net = rg.MomentumNet([Mlp(32, 256) for _ in range(24)], state_bits=16)
    x = torch.randn(512, 32)
    least = links_of(net, x)[0].peak
    kept = {}
    for name in ("integers", "floats"):
        if name == "floats":
            monkeypatch.setattr(schedule, "input_bytes", lambda recurrence, dtype: dtype.itemsize)
        inside = [link for link in links_of(net, x) if link.peak <= least + 8 * x.nbytes]
        kept[name] = inside[-1].plans[0].kept
    assert kept == {"floats": 9, "integers": 17}  # the last block's own float is there in any plan


def test_the_peak_is_as_predicted() -> None:
    """Measured. Blocks so wide that the temporaries of 16-bit steps on a CPU, which no prediction has, are below them."""
    net = rg.MomentumNet([Mlp(64, 2048) for _ in range(8)], state_bits=16, verify="off")
    x = torch.randn(512, 64)
    net(x)
    taken = {}
    for link in links_of(net, x)[:9:2]:
        (plan,) = link.plans
        other = planned(net, plan)
        for p in other.parameters():
            p.grad = torch.zeros_like(p)
        most = peak_memory(lambda: other(x).square().mean(), lambda loss: loss.backward()).peak  # noqa: B023
        taken[plan.kept] = most
        assert most <= link.peak <= most + 1.1 * x.nbytes  # a kept block's output, which is not made again
    assert taken[6] - taken[2] == 4 * x.nbytes / 2


def test_converted_stages_keep_integers(held: list[Tensor]) -> None:
    """And their plan says so."""
    found = {}
    for state_bits in (16, "auto"):
        torch.manual_seed(0)
        model = nn.TransformerEncoder(layer(), 12, enable_nested_tensor=False)
        plan = rg.plan(model, torch.empty(4, 24, 32), memory="checkpoint", state_bits=state_bits)
        found[state_bits] = plan.peaks["checkpoint"].held
        gradients = []
        for memory in ("checkpoint", "store"):
            other = rg.convert(copy.deepcopy(model), memory=memory, state_bits=state_bits)
            other(torch.ones(4, 24, 32)).square().mean().backward()
            gradients.append([p.grad for p in other.parameters()])
        assert all(map(torch.equal, *gradients))
        assert sum(type(q) is Tensor for q in held) == 12  # of the 16-bit stage
    x = 4 * 24 * 32
    assert found["auto"] - found[16] == pytest.approx(12 * 2 * x, abs=2 * x)
