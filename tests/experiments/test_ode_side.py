"""The networks of the experiment `ode`: repeats side by side, and a velocity that goes from block to block."""

from dataclasses import replace

import pytest
import torch

from retrograde_experiments.ode import Config, Side

SMALL = replace(Config.smoke(), blocks=3, solver="rk4", steps=1, gradient="direct", velocity="zero", repeats=2)


@pytest.mark.parametrize("velocity", ["zero", "first"])
def test_a_carried_velocity_goes_on_where_the_block_before_ended(velocity: str) -> None:
    torch.manual_seed(0)
    x, found = torch.randn(4, 6, 8, 8), {}
    for carried in (False, True):
        torch.manual_seed(1)
        net = Side(replace(SMALL, carried=carried, velocity=velocity), "second", 2, 3, 10)
        found[carried] = net(x)
    assert not torch.equal(found[True], found[False])
    y, v = net.stem(x), None
    for block in net.blocks:
        y, v = block.encode(y, v)
    expected = net.classify(net.head(y).flatten(2)).unflatten(1, (2, -1)).squeeze(-1).transpose(0, 1)
    assert torch.equal(found[True], expected)


@pytest.mark.parametrize("order", ["none", "first"])
def test_there_is_no_velocity_to_carry_in_other_orders(order: str) -> None:
    x, found = torch.randn(4, 6, 8, 8), []
    for carried in (False, True):
        torch.manual_seed(1)
        found.append(Side(replace(SMALL, carried=carried), order, 2, 3, 10)(x))
    assert torch.equal(*found)
