"""The scheme of docs/extending.md is a scheme: the page's own code, extracted and run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import KINDS, Mlp, assert_same_bits, stack, train_step

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
CODE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
DEPTH = 9
HELD = [(torch.float32, "auto"), (torch.float64, "auto"), (torch.bfloat16, "auto"), (torch.float32, "int16")]


def page() -> Any:
    names: dict[str, Any] = {"__name__": "leapfrog"}
    exec(compile(CODE, str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


leapfrog = page()


class Loud(nn.Module):
    """A block whose output is a thousand times its input at most."""

    def __init__(self) -> None:
        super().__init__()
        self.f = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return 1000 * self.f(x)


def loud() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mlp(), Mlp(), Loud(), Mlp(), Loud(), Mlp()]


def in_mode(net: nn.Module, memory: str) -> Any:
    other = copy.deepcopy(net)
    other.memory = memory
    return other


def plain(blocks: list[nn.Module], x: Tensor) -> Tensor:
    """The recurrence in floats."""
    before = x
    for f in blocks:
        before, x = x, before + f(x)
    return x


def test_it_is_one_file_under_100_lines() -> None:
    assert len([line for line in CODE.splitlines() if line.strip()]) < 100


@pytest.mark.parametrize(("dtype", "fixed_point"), HELD)
@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_mode_changes_a_bit(kind: str, dtype: torch.dtype, fixed_point: str) -> None:
    torch.manual_seed(0)
    blocks, x = stack(kind, DEPTH)
    x = x.to(dtype).requires_grad_()
    net = leapfrog.LeapfrogNet(blocks, "store", fixed_point).to(dtype)
    wanted = train_step(net, x)
    for memory in ("reverse", "checkpoint"):
        assert_same_bits(train_step(in_mode(net, memory), x), wanted)


@pytest.mark.parametrize("memory", ["reverse", "store"])
def test_its_gradients_are_those_of_the_recurrence(memory: str) -> None:
    torch.manual_seed(0)
    blocks, x = stack("mlp", DEPTH)
    net = leapfrog.LeapfrogNet(blocks, memory).double()
    x = x.double().requires_grad_()
    inputs = [x, *net.parameters()]
    y, reference = net(x), plain(list(net.blocks), x)
    torch.testing.assert_close(y, reference, rtol=1e-12, atol=1e-14)
    found = torch.autograd.grad(y.square().sum(), inputs)
    wanted = torch.autograd.grad(reference.square().sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: stack("mlp", DEPTH)[0], loud], ids=["quiet", "loud"])
def test_the_inverse_is_exact(make: Callable[[], list[nn.Module]]) -> None:
    torch.manual_seed(0)
    net = leapfrog.LeapfrogNet(make())
    x = torch.randint(-64, 64, (3, 8)) / 64
    with torch.no_grad():
        run = net.run(x)
        again = run.state.copy()
    assert not torch.equal(run.state.read(), x)
    assert torch.equal(net.inverse(again), x)


def test_the_first_pass_widens_its_range() -> None:
    net = leapfrog.LeapfrogNet(loud(), "store")
    x = torch.randn(3, 8, requires_grad=True)
    run = in_mode(net, "reverse").run(x)
    assert run.state.widenings, "no step left the range: this shows nothing"
    wanted = train_step(net, x)
    assert_same_bits(train_step(in_mode(net, "reverse"), x), wanted)
    assert_same_bits(train_step(in_mode(net, "checkpoint"), x), wanted)


def test_a_block_that_does_not_repeat_itself_is_found() -> None:
    class Counting(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.calls * super().forward(x)

    net = leapfrog.LeapfrogNet([Mlp(), Counting(), Mlp()])
    with pytest.raises(rg.ReplayError):
        net(torch.randn(3, 8)).sum().backward()
