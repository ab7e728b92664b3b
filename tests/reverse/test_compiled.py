"""Compiled blocks in a network that runs them again: the bits of stored activations, and nothing is compiled twice."""

import copy

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Mlp

FIXED = rg.FixedPoint(22, torch.int32)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # the compiler looks at it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of its own imports
]


class Normed(nn.Module):
    """Linear layers around a normalisation with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def compilations() -> int:
    return int(torch._dynamo.utils.counters["frames"]["total"])


def steps(net: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    """Gradients of every step, and the buffers at the end."""
    found = []
    for x in xs:
        net.zero_grad()
        net(x).square().mean().backward()
        found += [p.grad.clone() for p in net.parameters()]
    return [*found, *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_gradients_of_stored_activations_and_no_recompilation(backend: str, memory: str) -> None:
    torch._dynamo.reset()
    blocks, xs = [Normed() for _ in range(4)], [torch.randn(6, 8) for _ in range(4)]
    found = []
    for mode in ("store", memory):
        parts = [torch.compile(block, backend=backend) for block in copy.deepcopy(blocks)]
        net = rg.MomentumNet(
            parts, form="block", memory=mode, fixed_point=FIXED, verify="strict" if mode != "store" else "off"
        )
        first = steps(net, xs[:1])
        before = compilations()
        found.append([*first, *steps(net, xs[1:])])
        assert compilations() == before
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("which", ["blocks in place", "whole model"])
def test_compiled_in_place_and_as_a_whole(memory: str, which: str) -> None:
    torch._dynamo.reset()
    blocks, xs = [Mlp() for _ in range(3)], [torch.randn(3, 8) for _ in range(3)]
    head, tail, found = nn.Linear(8, 8), nn.Linear(8, 8), []
    for compiled in (False, True):
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=memory, fixed_point=FIXED)
        model: nn.Module = nn.Sequential(head, net, tail)
        if compiled and which == "whole model":
            model = torch.compile(model, backend="aot_eager")
        elif compiled:
            for block in net.blocks:
                block.compile(backend="aot_eager")
        first = steps(model, xs[:1])
        before = compilations()
        found.append([*first, *steps(model, xs[1:])])
        assert compilations() == before
    assert before  # something was compiled
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_counters_of_the_compiler_are_its_users_own(backend: str) -> None:
    """A replay of compiled code does not go by them: they may be cleared at any time."""
    torch._dynamo.reset()
    blocks, x, found = [Normed() for _ in range(3)], torch.randn(6, 8), []
    for mode in ("store", "reverse"):
        parts = [torch.compile(block, backend=backend) for block in copy.deepcopy(blocks)]
        net = rg.MomentumNet(parts, form="block", memory=mode, fixed_point=FIXED)
        y = net(x)
        torch._dynamo.utils.counters.clear()
        y.square().mean().backward()
        assert compilations() == 0
        found.append([*(p.grad for p in net.parameters()), *net.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_a_module_can_be_copied_while_it_is_run_again(memory: str) -> None:
    """Its statistics are put aside meanwhile; a copy has ordinary ones, and is a module that can be trained."""
    blocks, x, found = [Normed() for _ in range(3)], torch.randn(6, 8), []
    copies: list[nn.Module] = []
    torch._dynamo.utils.counters.clear()  # as where nothing is compiled
    for mode in ("store", memory):
        net = rg.MomentumNet(copy.deepcopy(blocks), form="block", memory=mode, fixed_point=FIXED)
        y = net(x)
        for block in net.blocks if mode == memory else ():
            block.layers[1].register_forward_hook(lambda m, a, y: copies.append(copy.deepcopy(m)))
        y.square().mean().backward()
        found.append([*(p.grad for p in net.parameters()), *net.buffers()])
    assert len(copies) == 3
    for m in copies:
        assert all(type(b) is Tensor for b in m.buffers())
        before = int(m.num_batches_tracked)
        m._forward_hooks.clear()
        m(torch.randn(6, 12))
        assert m.num_batches_tracked == before + 1
    assert all(map(torch.equal, *found))
