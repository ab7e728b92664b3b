"""The limit γ → 1: the equation itself, its potential and its energy."""

import pytest
import torch

from problems import Mlp
from retrograde.nets.hamiltonian import HamiltonianBlock, HamiltonianNet


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
