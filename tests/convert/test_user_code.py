"""Models that are nobody's but the user's: found by a trial on an example, converted without editing them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from conversion import anatomy, step
from problems import assert_same_bits
from retrograde.convert.convert import look, stages_of


class Residual(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor, *args: Any, scale: Any = 1.0, **kwargs: Any) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x))) * scale


class Scaled(Residual):
    def forward(self, x: Tensor, shift: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return x + self.outer(torch.tanh(self.inner(x + shift))) * scale


class Looped(nn.Module):
    """A loop over a ModuleList; every block gets another positional and another keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Parameter(torch.randn(5, 8) / 3)
        self.layers = nn.ModuleList(Scaled() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for k, (layer, shift) in enumerate(zip(self.layers, self.shifts, strict=True)):
            x = layer(x, shift, scale=1.0 / (k + 1))
        return x


class ByKeyword(nn.Module):
    """Blocks that take x by its name and return a tuple with something else in it."""

    class Layer(Residual):
        def forward(self, *, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            f = self.outer(torch.tanh(self.inner(hidden))) * mask
            return hidden + f, f.abs().sum()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(())
        for layer in self.layers:
            x, size = layer(hidden=x, mask=mask)
            total = total + size
        return x, total


class UNet(nn.Module):
    """Down and up again, with skips from side to side and residual stages on each level."""

    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(torch.relu(self.norm(x)))

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(*[self.Block(c) for _ in range(3)]) for c in (4, 8))
        self.pool, self.middle = nn.Conv2d(4, 8, 2, 2), nn.Sequential(*[self.Block(8) for _ in range(3)])
        self.unpool, self.up = nn.ConvTranspose2d(8, 4, 2, 2), nn.ModuleList(self.Block(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down[0](x)
        low = self.down[1](self.pool(skip))
        x = self.unpool(self.middle(low) + low) + skip
        for block in self.up:
            x = block(x)
        return x


class Apart(nn.Module):
    """Blocks in different parents."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(4):
            setattr(self, f"part{k}", nn.ModuleDict({"body": Residual(), "head": nn.Linear(8, 2)}))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = []
        for k in range(4):
            part = getattr(self, f"part{k}")
            x = part["body"](x)
            heads.append(part["head"](x))
        return x, torch.stack(heads)


class Added(nn.Module):
    """x = x + f(x), written by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return x


class Repeated(nn.Module):
    """One block, run five times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.block(x)
        return x


X = torch.linspace(-2, 2, 24).view(3, 8)
MODELS: dict[str, tuple[type[nn.Module], Any, list[int]]] = {
    "arguments per layer": (Looped, X, [5]),
    "x by keyword, tuples": (ByKeyword, {"x": X, "mask": (X > 0).float()}, [4]),
    "u-net": (UNet, torch.linspace(-1, 1, 512).view(2, 4, 8, 8), [3, 6, 3]),
    "different parents": (Apart, X, [4]),
    "x + f(x) in the model": (Added, X, [5]),
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
    model = Repeated()
    finding = look(model, X)
    assert [(run.blocks, run.steps) for run in finding.runs] == [(("block",) * 5, 5)]
    found = {}
    for mode in ("store", "reverse"):
        found[mode] = step(rg.convert(model, X, memory=mode), lambda m: m(X))
        rg.revert(model)
    assert_same_bits(found["store"], found["reverse"])
    net = rg.MomentumNet([copy.deepcopy(model.block)] * 5, gamma=1 / 8, form="block", memory="store")
    assert torch.equal(net(X).detach(), found["store"]["output"])


def test_a_loop_is_the_momentum_network_of_its_blocks() -> None:
    model = nn.Sequential(*[Residual() for _ in range(6)])
    net = rg.MomentumNet(list(copy.deepcopy(model)), gamma=0.8, form="block", memory="reverse")
    converted = rg.convert(model, X, gamma=0.8, memory="reverse")
    assert torch.equal(converted(X), net(X))


def test_gradients_reach_arguments_of_the_blocks() -> None:
    model = Looped()
    found = {}
    for mode in ("store", "reverse"):
        found[mode] = step(rg.convert(model, X, memory=mode), lambda m: m(X))
        rg.revert(model)
    assert found["reverse"]["gradient shifts"].abs().min() > 0
    assert torch.equal(found["store"]["gradient shifts"], found["reverse"]["gradient shifts"])


def test_x_changed_in_place_between_blocks_starts_anew() -> None:
    class Damped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Residual() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for k, layer in enumerate(self.layers):
                x = layer(x)
                if k == 1:
                    x.mul_(0.5)
            return x

    model = Damped()
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
    model = UNet()
    rg.convert(model, stages=["down.*", "middle"])
    assert [stage.name for stage in stages_of(model)] == ["down.0.0-2", "down.1.0-2", "middle.0-2"]
    rg.revert(model)
    rg.convert(Apart(), stages="part*.body")


def test_named_branches_need_no_example() -> None:
    model = Added()
    by_example, by_name = copy.deepcopy(model), copy.deepcopy(model)
    rg.convert(by_example, X)
    rg.convert(by_name, stages=["branches"], form="branch")
    assert torch.equal(by_example(X), by_name(X))


class Between(nn.Module):
    """Blocks with something in between that leaves x and changes its gradient."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[1](self.between(self.blocks[0](x)))
        return out


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
    model = rg.convert(Between(between), stages="blocks", memory="reverse")
    with pytest.warns(UserWarning, match="velocity starts from 0 again"):
        model(torch.randn(2, 3, 8)).square().sum().backward()
    assert (model.blocks[0].linear1.weight.grad is not None) == (between == Reversed.apply)
