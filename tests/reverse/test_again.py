"""On an accelerator a pass that leaves its range is run again, with the bits of a pass that was looked at step by step.

No accelerator is needed: a `Deferred` that is given events waits for values as on one.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import assert_same_bits, train_step
from retrograde.convert.convert import stages_of
from retrograde.nets.coupling import CouplingNet
from retrograde.reverse.deferred import Deferred
from ways import Event

COARSE = pytest.mark.filterwarnings("ignore:the input of this pass was held to")
RAN_AGAIN = pytest.mark.filterwarnings("ignore:stage .* left its range")


def waited_for(model: nn.Module) -> nn.Module:
    """The same model as on an accelerator, where to look at values makes the host wait."""
    if isinstance(model, Model):
        model.hidden.clear()
    model = copy.deepcopy(model)
    for part in (model, *stages_of(model)):
        if hasattr(part, "range"):
            part.range.deferred = Deferred(event_on=lambda device: Event())
    return model


class Block(nn.Module):
    """Draws, moves running statistics, and grows at will."""

    def __init__(self, width: int = 8, residual: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.residual, self.size, self.calls = residual, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        f = self.size * self.norm(self.dropout(self.linear(x)))
        return x + f if self.residual else f


class Model(nn.Module):
    """A model with a loop of its own, which may hand out what it has between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(residual=True) for _ in range(6))
        self.hidden: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden.clear()
        for block in self.blocks:
            x = block(x)
            self.hidden.append(x)
        return x


def grown(model: nn.Module, size: float = 1e6) -> None:
    for block in model.modules():
        if isinstance(block, Block):
            block.size = size


def calls(model: nn.Module) -> list[int]:
    return [block.calls for block in model.modules() if isinstance(block, Block)]


def trained(model: nn.Module, sizes: list[float]) -> list[dict[str, Tensor]]:
    """Steps in which the blocks have these sizes: output, gradients, buffers and the next random number of each."""
    found = []
    for step, size in enumerate(sizes):
        grown(model, size)
        torch.manual_seed(step)
        x = torch.randn(4, 8, requires_grad=True)
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        found.append(
            {"y": y.detach(), "x": x.grad, "next random": torch.rand(1)}
            | {name: p.grad for name, p in model.named_parameters()}
            | {name: b.clone() for name, b in model.named_buffers()}
        )
    return found


NETS: dict[str, Callable[[str], nn.Module]] = {
    "gamma 0.9": lambda memory: rg.MomentumNet([Block() for _ in range(6)], memory=memory),
    "gamma 1/8, v0": lambda memory: rg.MomentumNet([Block() for _ in range(6)], 1 / 8, velocity="first", memory=memory),
    "gamma 1, block": lambda memory: rg.MomentumNet(
        [Block(residual=True) for _ in range(6)], 1.0, form="block", memory=memory
    ),
    "form relu": lambda memory: rg.MomentumNet([Block() for _ in range(6)], 0.5, form="relu", memory=memory),
    "tied": lambda memory: rg.MomentumNet([Block()] * 6, 0.9, memory=memory),
    "random sign": lambda memory: rg.MomentumNet([Block() for _ in range(6)], rg.RandomSign(1 / 4), memory=memory),
    "coupling": lambda memory: CouplingNet([Block(4) for _ in range(6)], memory=memory),
    "converted": lambda memory: rg.convert(Model(), torch.randn(4, 8), memory=memory),
}


@COARSE
@RAN_AGAIN
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("kind", NETS)
def test_a_pass_that_left_its_range_is_run_again_with_the_bits_of_one_looked_at(kind: str, memory: str) -> None:
    """Outputs, gradients, running statistics and random numbers; before, in and after the step that grows."""
    net = NETS[kind](memory)
    ours = waited_for(net)
    sizes = [1.0, 1.0, 1e6, 1e6, 1.0]
    for found, wanted in zip(trained(ours, sizes), trained(net, sizes), strict=True):
        assert_same_bits(found, wanted)
    rg.settle(ours)
    assert sum(calls(ours)) > sum(calls(net)), "nothing was run again, so nothing was tested"


@COARSE
@pytest.mark.parametrize("kind", [k for k in NETS if k != "converted"])
def test_nothing_is_run_again_where_the_range_was_kept(kind: str) -> None:
    net = NETS[kind]("reverse")
    ours = waited_for(net)
    trained(ours, [1.0] * 3)
    trained(net, [1.0] * 3)
    assert calls(ours) == calls(net)


@COARSE
@RAN_AGAIN
def test_what_was_handed_out_between_blocks_gets_its_values() -> None:
    model = rg.convert(Model(), torch.randn(4, 8), memory="reverse")
    ours = waited_for(model)
    for size in (1.0, 1.0, 1e6):
        found = []
        for m in (ours, model):
            grown(m, size)
            torch.manual_seed(3)
            m(torch.randn(4, 8)).sum().backward()
            found.append([h.detach().clone() for h in m.hidden])
        assert all(map(torch.equal, *found))


@COARSE
def test_a_gradient_through_the_first_run_is_refused() -> None:
    model = waited_for(rg.convert(Model(), torch.randn(4, 8), memory="reverse"))
    for size in (1.0, 1.0):
        grown(model, size)
        (model(torch.randn(4, 8)).sum() + model.hidden[2].sum()).backward()
    grown(model)
    with pytest.warns(UserWarning, match="run once more"):
        y = model(torch.randn(4, 8))
    with pytest.raises(rg.RangeOverflow, match="Run this step again"):
        (y.sum() + model.hidden[2].sum()).backward()
    (model(torch.randn(4, 8)).sum() + model.hidden[2].sum()).backward()  # the next step has the range


@COARSE
@pytest.mark.parametrize("grad", [True, False])
def test_evaluation(grad: bool) -> None:
    """Without gradients a converted model is looked at step by step: what it makes of an x between blocks is right."""
    for net in (NETS["gamma 0.9"]("auto"), rg.convert(Model(), torch.randn(4, 8))):
        net.eval()
        ours = waited_for(net)
        for size in (1.0, 1.0, 1e6):
            x, found = torch.randn(4, 8), []
            for n in (ours, net):
                grown(n, size)
                with torch.set_grad_enabled(grad), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.append(n(x).detach())
            assert torch.equal(*found)
        assert grad or not isinstance(net, Model) or calls(ours) == calls(net)


class Collector(nn.Module):
    """Adds to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor, notes: list[int]) -> Tensor:
        notes.append(len(notes))
        return self.size * torch.tanh(self.linear(x))


class Counter(nn.Module):
    """Writes to a buffer that is no running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(4, 4), 1.0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, notes: Any) -> Tensor:
        self.count += 1
        return self.size * torch.tanh(self.linear(x))


@COARSE
@pytest.mark.parametrize("block", [Collector, Counter])
def test_a_block_that_leaves_a_trace_is_not_run_twice(block: type[nn.Module]) -> None:
    net = waited_for(rg.MomentumNet([block() for _ in range(4)], memory="store"))
    x = torch.randn(2, 4)
    for passes, size in enumerate((1.0, 1.0, 1e6), start=1):
        for b in net.blocks:
            b.size = size
        notes: list[int] = []
        y = net(x, notes)
        assert y.isfinite().all()
        if block is Collector:
            assert notes == [0, 1, 2, 3]
        else:
            assert [int(b.count) for b in net.blocks] == [passes] * 4


@pytest.mark.parametrize("overflow", ["raise", "nan"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_still_refused_or_let_through(bad: float, overflow: str) -> None:
    """At once, and not at a later pass: no optimizer takes a step on it."""
    net = waited_for(rg.MomentumNet([Block() for _ in range(4)], overflow=overflow))
    trained(net, [1.0, 1.0])
    net.blocks[2].size = bad
    if overflow == "raise":
        with pytest.raises(rg.RangeOverflow, match="NaN or Inf out of block 2"):
            net(torch.randn(4, 8))
    else:
        assert net(torch.randn(4, 8)).isnan().all()
    trained(net, [1.0])


@COARSE
def test_an_input_that_does_not_fit_is_run_again_too() -> None:
    net = rg.MomentumNet([nn.Linear(4, 4) for _ in range(4)])
    ours, x = waited_for(net), torch.randn(3, 4)
    for scale in (1.0, 1.0, 1e8):
        assert_same_bits(train_step(ours, scale * x), train_step(net, scale * x))


@COARSE
def test_a_hook_between_blocks_is_not_lost() -> None:
    """Where somebody looks at an x there is a look at the range, so the steps after it widen within the pass."""

    def clipped(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
        handle = m.blocks[0].register_forward_hook(
            lambda _, __, y: y.register_hook(lambda g: g.clamp(-1e-3, 1e-3)) and None
        )
        torch.manual_seed(5)
        m.zero_grad()
        m(x).square().mean().backward()
        handle.remove()
        return {name: p.grad for name, p in m.named_parameters()}

    model = rg.convert(Model(), torch.randn(4, 8), memory="reverse")
    ours, x = waited_for(model), torch.randn(4, 8)
    for size in (1.0, 1.0, 1e6):
        grown(ours, size)
        grown(model, size)
        assert_same_bits(clipped(ours, x), clipped(model, x))


def test_the_input_is_let_go_of_where_the_pass_ends() -> None:
    net = waited_for(rg.MomentumNet([nn.Linear(4, 4) for _ in range(6)], memory="reverse"))
    for _ in range(2):
        x = torch.randn(3, 4).requires_grad_() * 1.0
        seen = weakref.ref(x)
        y = net(x)
        del x
        gc.collect()
        assert seen() is None
        y.sum().backward()


class Uncounted(nn.Module):
    """Statistics of its own, moved in a way that PyTorch does not count, and used."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.size = nn.Linear(8, 8), 1.0
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=True)
        return self.size * (y + self.mean)


@COARSE
@pytest.mark.parametrize("memory", ["store", "reverse", "checkpoint"])
def test_statistics_that_are_moved_uncounted_move_once(memory: str) -> None:
    """Such blocks are not run again: they are looked at step by step, from the second pass on."""
    torch.manual_seed(0)
    net = rg.MomentumNet([Uncounted() for _ in range(4)], gamma=0.9, memory=memory)
    there = waited_for(net)
    for size in (1.0, 1.0, 1e4, 1e4, 1.0, 1e6):
        x = torch.randn(5, 8)
        for each in (net, there):
            for block in each.blocks:
                block.size = size
            each.zero_grad()
            each(x).square().mean().backward()
        for a, b in zip(net.buffers(), there.buffers(), strict=True):
            assert torch.equal(a, b)
