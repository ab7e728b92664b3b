"""Models that are nobody's but the user's: found by a trial on an example, converted without editing them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from conversion import MODES, anatomy, converted_in, step
from problems import Of, assert_same_bits
from retrograde.convert.convert import look, stages_of


def f(b: Any, x: Tensor) -> Tensor:
    return b.outer(torch.tanh(b.inner(x)))


def block(run: Callable[..., Any]) -> nn.Module:
    return Of(run, inner=nn.Linear(8, 12), outer=nn.Linear(12, 8))


def residual() -> nn.Module:
    return block(lambda b, x, *args, scale=1.0, **kwargs: x + f(b, x) * scale)


def listed(make: Callable[[], nn.Module], depth: int) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(depth))


def looped() -> nn.Module:
    """A loop over a ModuleList; every block gets another positional and another keyword argument."""

    def scaled(b: Any, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:
        return x + f(b, x + shift) * scale

    def run(model: Any, x: Tensor) -> Tensor:
        for k, (layer, shift) in enumerate(zip(model.layers, model.shifts, strict=True)):
            x = layer(x, shift, scale=1.0 / (k + 1))
        return x

    return Of(run, shifts=nn.Parameter(torch.randn(5, 8) / 3), layers=listed(lambda: block(scaled), 5))


class ByKeyword(nn.Module):
    """Takes x by its name and returns a tuple with something else in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, *, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = f(self, hidden) * mask
        return hidden + y, y.abs().sum()


def by_keyword() -> nn.Module:
    def run(model: Any, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(())
        for layer in model.layers:
            x, size = layer(hidden=x, mask=mask)
            total = total + size
        return x, total

    return Of(run, layers=listed(ByKeyword, 4))


def unet() -> nn.Module:
    """Down and up again, with skips from side to side and residual stages on each level."""

    def conv(channels: int) -> nn.Module:
        parts = {"norm": nn.BatchNorm2d(channels), "conv": nn.Conv2d(channels, channels, 3, padding=1)}
        return Of(lambda b, x: x + b.conv(torch.relu(b.norm(x))), **parts)

    def level(channels: int) -> nn.Module:
        return nn.Sequential(*[conv(channels) for _ in range(3)])

    def run(model: Any, x: Tensor) -> Tensor:
        skip = model.down[0](x)
        low = model.down[1](model.pool(skip))
        x = model.unpool(model.middle(low) + low) + skip
        for each in model.up:
            x = each(x)
        return x

    resized = {"pool": nn.Conv2d(4, 8, 2, 2), "unpool": nn.ConvTranspose2d(8, 4, 2, 2)}
    up = listed(lambda: conv(4), 3)
    return Of(run, down=nn.ModuleList([level(4), level(8)]), middle=level(8), up=up, **resized)


def apart() -> nn.Module:
    """Blocks in different parents."""

    def run(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = []
        for k in range(4):
            part = getattr(model, f"part{k}")
            x = part["body"](x)
            heads.append(part["head"](x))
        return x, torch.stack(heads)

    return Of(run, **{f"part{k}": nn.ModuleDict({"body": residual(), "head": nn.Linear(8, 2)}) for k in range(4)})


def added() -> nn.Module:
    """x = x + f(x), written by the model."""

    def run(model: Any, x: Tensor) -> Tensor:
        for branch in model.branches:
            x = x + branch(x)
        return x

    return Of(run, branches=listed(lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)), 5))


def repeated() -> nn.Module:
    """One block, run five times."""

    def run(model: Any, x: Tensor) -> Tensor:
        for _ in range(5):
            x = model.block(x)
        return x

    return Of(run, block=residual())


X = torch.linspace(-2, 2, 24).view(3, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, list[int]]] = {
    "arguments per layer": (looped, X, [5]),
    "x by keyword, tuples": (by_keyword, {"x": X, "mask": (X > 0).float()}, [4]),
    "u-net": (unet, torch.linspace(-1, 1, 512).view(2, 4, 8, 8), [3, 6, 3]),
    "different parents": (apart, X, [4]),
    "x + f(x) in the model": (added, X, [5]),
}


def output(model: nn.Module, example: Any) -> Tensor:
    out = model(**example) if isinstance(example, dict) else model(example)
    return out if isinstance(out, Tensor) else torch.cat([t.flatten() for t in out])


@pytest.mark.parametrize("name", MODELS)
def test_converted_by_example_and_trained(name: str) -> None:
    make, example, blocks = MODELS[name]
    model = make()
    plain, before = step(model, lambda m: output(m, example)), anatomy(model)
    found = {}
    for mode in ("store", "reverse", "checkpoint"):
        rg.convert(model, example, memory=mode, verify="off" if mode == "store" else "strict")
        assert [stage.steps for stage in stages_of(model) if not stage.checkpointed] == blocks
        found[mode] = step(model, lambda m: output(m, example))
        rg.revert(model)
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
    assert not torch.equal(found["store"]["output"], plain["output"])
    rg.convert(model, example, gamma=0, memory="checkpoint")
    assert_same_bits(step(model, lambda m: output(m, example)), plain)
    rg.revert(model)
    assert anatomy(model) == before


def test_block_repeated_runs_as_one_stage() -> None:
    model = repeated()
    finding = look(model, X)
    assert [(run.blocks, run.steps) for run in finding.runs] == [(("block",) * 5, 5)]
    found = converted_in(MODES, model, lambda m: m(X), X)
    net = rg.MomentumNet([copy.deepcopy(model.block)] * 5, gamma=1 / 8, form="block", memory="store")
    assert torch.equal(net(X).detach(), found["output"])


def test_a_loop_is_the_momentum_network_of_its_blocks() -> None:
    model = nn.Sequential(*[residual() for _ in range(6)])
    net = rg.MomentumNet(list(copy.deepcopy(model)), gamma=0.8, form="block", memory="reverse")
    converted = rg.convert(model, X, gamma=0.8, memory="reverse")
    assert torch.equal(converted(X), net(X))


def test_gradients_reach_arguments_of_the_blocks() -> None:
    model = looped()
    found = converted_in(MODES, model, lambda m: m(X), X)
    assert found["gradient shifts"].abs().min() > 0


def test_x_changed_in_place_between_blocks_starts_anew() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        for k, layer in enumerate(model.layers):
            x = layer(x)
            if k == 1:
                x.mul_(0.5)
        return x

    model = Of(run, layers=listed(residual, 4))
    halves = [
        rg.MomentumNet(
            list(copy.deepcopy(model.layers[a:b])), 1 / 8, form="block", fixed_point=rg.FixedPoint(20, torch.int32)
        )
        for a, b in ((0, 2), (2, 4))
    ]
    rg.convert(model, stages=["layers"], memory="reverse", fixed_point=rg.FixedPoint(20, torch.int32))
    with pytest.warns(UserWarning, match=r"layers\.2 was given something other .* its velocity starts from 0 again"):
        y = model(X)
    assert torch.equal(y, halves[1](halves[0](X) * 0.5))


def test_stages_by_pattern_and_container() -> None:
    model = unet()
    rg.convert(model, stages=["down.*", "middle"])
    assert [stage.name for stage in stages_of(model)] == ["down.0.0-2", "down.1.0-2", "middle.0-2"]
    rg.revert(model)
    rg.convert(apart(), stages="part*.body")


def test_named_branches_need_no_example() -> None:
    model = added()
    by_example, by_name = copy.deepcopy(model), copy.deepcopy(model)
    rg.convert(by_example, X)
    rg.convert(by_name, stages=["branches"], form="branch")
    assert torch.equal(by_example(X), by_name(X))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.parametrize("between", [Tensor.detach, Reversed.apply, lambda x: x.detach().requires_grad_()])
def test_a_gradient_cut_or_changed_between_blocks_is_not_led_around(between: Any) -> None:
    """Such an x has the memory of the one handed on, and is none the less not the continuation of the pass."""
    blocks = listed(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    model: Any = Of(lambda m, x: m.blocks[1](between(m.blocks[0](x))), blocks=blocks)
    rg.convert(model, stages="blocks", memory="reverse")
    with pytest.warns(UserWarning, match="velocity starts from 0 again"):
        model(torch.randn(2, 3, 8)).square().sum().backward()
    assert (model.blocks[0].linear1.weight.grad is not None) == (between == Reversed.apply)


class Momentum(nn.Module):
    """A slow copy of its blocks follows them in forward, as in contrastive learning."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.fast = nn.Sequential(*listed(residual, 4))
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        flat = torch.ones(6)
        self.halves = nn.ParameterList([nn.Parameter(flat[:3]), nn.Parameter(flat[3:])])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.halves[1].mul_(0.5)
            self.halves[0].mul_(0.5)
            torch.eye(3).to_sparse().mul_(2.0)
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                if self.by_data:
                    slow.data = slow.data * 0.9 + (fast.data + 1) * 0.1
                else:
                    slow.mul_(0.9).add_(fast + 1, alpha=0.1)
        return self.fast(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_a_trial_leaves_parameters_that_forward_moves_as_they_were(by_data: bool) -> None:
    model = Momentum(by_data)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    rg.convert(model, torch.randn(2, 8))
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])
