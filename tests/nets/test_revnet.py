"""RevNets and i-RevNets: the equation, squeezes."""

import pytest
import torch

from problems import Mlp
from retrograde.arithmetic.squeeze import squeeze, unsqueeze
from retrograde.nets.revnet import RevNet


def test_against_floats_and_autograd_alone() -> None:
    phi, psi = ([Mlp(4, 6) for _ in range(10)] for _ in range(2))
    net = RevNet(phi, psi, memory="reverse").double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    v, u = x.chunk(2, 1)
    for phi, psi in zip(net.blocks[::2], net.blocks[1::2], strict=True):
        v = v + phi(u)
        u = u + psi(v)
    weights = [x, *net.parameters()]
    expected = torch.autograd.grad(torch.cat([v, u], 1).square().sum(), weights)
    found = torch.autograd.grad(net(x).square().sum(), weights)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("r", [1, 2, 3])
def test_squeeze_is_a_permutation(dtype: torch.dtype, r: int) -> None:
    x = torch.arange(2 * 3 * 6 * 12).view(2, 3, 6, 12).to(dtype)
    y = squeeze(x, r)
    assert y.shape == (2, 3 * r * r, 6 // r, 12 // r)
    assert torch.equal(unsqueeze(y, r), x)
    assert torch.equal(y.flatten().sort().values, x.flatten())
