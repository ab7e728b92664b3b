"""The limit γ → 1: symplectic, reversible to the bit, flat in memory."""

import pytest
import torch
from torch import nn

import retrograde as rg
from problems import Mlp, same_in_every_mode
from retrograde.memory import held_bytes
from retrograde.nets.hamiltonian import HamiltonianBlock, HamiltonianNet


@pytest.mark.parametrize("depth", [1, 3, 40])
@pytest.mark.parametrize("velocity", [None, "first", "learned"])
def test_gradients_are_those_of_stored_activations(depth: int, velocity: str | None) -> None:
    v0 = nn.Linear(8, 8) if velocity == "learned" else velocity
    net = HamiltonianNet([HamiltonianBlock(8, 5) for _ in range(depth)], 0.3, velocity=v0, verify="strict")
    found = same_in_every_mode(net, torch.randn(3, 8, requires_grad=True))
    assert all(torch.isfinite(g).all() and g.any() for g in found.values())


def test_convolutions() -> None:
    blocks = [HamiltonianBlock(4, 6, kernel=3) for _ in range(6)]
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    same_in_every_mode(HamiltonianNet(blocks, 0.5, verify="strict"), x)


@pytest.mark.parametrize("velocity", [None, "first"])
def test_it_is_the_equation(velocity: str | None) -> None:
    h, blocks = 0.2, [Mlp().double() for _ in range(12)]
    x0 = torch.randn(3, 8, dtype=torch.float64)
    x, v = x0, blocks[0](x0) if velocity else torch.zeros_like(x0)
    for f in blocks:
        v = v + h * f(x)
        x = x + h * v
    state = HamiltonianNet(blocks, h, velocity=velocity).encode(x0)
    torch.testing.assert_close(state.x, x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.v / h, v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "kernel", "shape"), [(5, None, (3, 5)), (3, 3, (2, 3, 6, 6))])
def test_the_block_is_minus_the_gradient_of_its_potential(width: int, kernel: int | None, shape: tuple) -> None:
    block = HamiltonianBlock(width, 7, kernel=kernel).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(block.potential(x).sum(), x)
    torch.testing.assert_close(block(x), -gradient)


def test_energy_stays_and_its_error_is_of_the_order_of_the_step() -> None:
    """Over a fixed time: not the growth that Euler's method has, and half the step gives half the error."""
    block, x = HamiltonianBlock(6).double(), torch.randn(4, 6, dtype=torch.float64)
    drift = []
    with torch.no_grad():
        for steps in (200, 400):
            net = HamiltonianNet([block] * steps, 20.0 / steps)
            drift.append(float((net.energy(net.encode(x)) - block.potential(x)).abs().max()))
    assert drift[0] < 0.1
    assert drift[1] / drift[0] == pytest.approx(0.5, abs=0.2)


@pytest.mark.parametrize("depth", [1, 100, 3_000])
def test_inverse_recovers_the_input_bit_for_bit(depth: int) -> None:
    net = HamiltonianNet([HamiltonianBlock(8)] * depth, 0.05)
    x = torch.randn(3, 8)
    state = net.encode(x)
    assert not torch.equal(state.x, x)
    assert torch.equal(net.inverse(state), state.fixed.decode(state.fixed.encode(x), x.dtype))


def test_bytes_held_do_not_grow_with_depth() -> None:
    """Reverse: x and v, and no buffer. Store: every activation, so the same test fails for it."""
    x, slope = torch.randn(4_096, 8), {}
    for memory in ("reverse", "store"):
        held = []
        for depth in (10, 30):
            net = HamiltonianNet(
                [HamiltonianBlock(8)] * depth, 0.1, memory=memory, fixed_point=rg.FixedPoint(20, torch.int32)
            )
            held.append(held_bytes(lambda: net(x).sum()) / x.numel())  # noqa: B023
        slope[memory] = (held[1] - held[0]) / 20
        if memory == "reverse":
            assert 8 <= held[1] < 8.5
    assert slope["reverse"] < 0.01
    assert slope["store"] > 7


def test_it_trains() -> None:
    net = HamiltonianNet([HamiltonianBlock(2, 8) for _ in range(10)], 0.3, velocity=nn.Linear(2, 2), memory="reverse")
    x = torch.randn(128, 2)
    target = torch.stack([x[:, 1], -x[:, 0]], 1)
    optimizer = torch.optim.Adam(net.parameters(), 2e-2)
    losses = []
    for _ in range(80):
        loss = (net(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 10


def test_wrong_input() -> None:
    for step in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step must be above 0"):
            HamiltonianNet([Mlp()], step)
    with pytest.raises(TypeError, match="step must be a number"):
        HamiltonianNet([Mlp()], "0.1")
    with pytest.raises(ValueError, match="kernel must be odd"):
        HamiltonianBlock(3, kernel=4)
    net = HamiltonianNet([Mlp()])
    state = net.encode(torch.ones(1, 8))
    with pytest.raises(TypeError, match="no potential"):
        net.energy(state)
    assert "step=0.5" in HamiltonianNet([Mlp()], 0.5).extra_repr()
