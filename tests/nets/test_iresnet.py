"""Spectral bounds against dense singular values; certified inverses; refusals."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from retrograde.nets.iresnet import BoundedConv2d, BoundedLinear, IResNet, certified_norm, needed, symbol_norm


def convolutional(channels: int = 4, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3, padding=1), nn.ELU(), nn.Conv2d(hidden, hidden, 1), nn.ELU(),
        nn.Conv2d(hidden, channels, 3, padding=1),
    )  # fmt: skip


def dense(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, width))


def stretched(blocks: list[nn.Sequential], factor: float = 5.0) -> list[nn.Sequential]:
    """Weights far beyond the bound, so that it is the bound that acts."""
    for p in nn.ModuleList(blocks).parameters():
        p.data *= factor
    return blocks


def matrix(layer: nn.Conv2d, weight: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """The convolution as a matrix, column by column."""
    units = torch.eye(math.prod(shape), dtype=weight.dtype).view(-1, *shape)
    return F.conv2d(units, weight, None, layer.stride, layer.padding, layer.dilation).flatten(1).t()


@pytest.mark.parametrize(
    "settings", [{"padding": 1}, {"padding": 0}, {"padding": 1, "stride": 2}, {"padding": 2, "dilation": 2}]
)
@pytest.mark.parametrize("kernel", [1, 3])
def test_the_norm_is_that_of_the_convolution_itself(settings: dict[str, int], kernel: int) -> None:
    plain, shape = nn.Conv2d(3, 5, kernel, **settings).double(), (3, 6, 7)
    layer = BoundedConv2d(plain, 0.5).eval()
    layer(torch.zeros(1, *shape, dtype=torch.float64))
    exact = float(torch.linalg.matrix_norm(matrix(plain, plain.weight, shape), 2).detach())
    assert float(layer.sigma().detach()) == pytest.approx(exact, rel=1e-3)
    assert torch.linalg.matrix_norm(matrix(plain, layer.bounded(), shape), 2) <= 0.5 * (1 + 1e-3)
    assert certified_norm(plain, torch.Size(shape), plain.weight) == pytest.approx(exact, rel=1e-9)
    assert exact * (1 - 1e-12) <= symbol_norm(plain, torch.Size(shape), plain.weight) <= 1.5 * exact
    if kernel == 3:
        reshaped = float(torch.linalg.matrix_norm(plain.weight.flatten(1), 2).detach())
        assert abs(reshaped - exact) > 0.02 * exact  # the shortcut is another number


def test_the_symbols_bound_is_tight_on_large_images() -> None:
    plain, shape = nn.Conv2d(2, 3, 3, padding=1).double(), torch.Size((2, 40, 40))
    layer = BoundedConv2d(plain, 0.5).eval()
    layer(torch.zeros(1, *shape, dtype=torch.float64))
    sigma = float(layer.sigma().detach())
    assert (
        sigma <= certified_norm(plain, shape, plain.weight) == symbol_norm(plain, shape, plain.weight) <= 1.02 * sigma
    )


def test_the_linear_norm_and_small_weights_are_left_alone() -> None:
    plain = nn.Linear(7, 4).double()
    layer, x = BoundedLinear(plain, 0.3).eval(), torch.randn(5, 7, dtype=torch.float64)
    layer(x)
    assert float(torch.linalg.matrix_norm(layer.bounded(), 2).detach()) == pytest.approx(0.3, rel=1e-5)
    plain.weight.data *= 1e-2
    assert torch.equal(layer(x), plain(x))


def test_training_follows_the_weights() -> None:
    layer, x = BoundedLinear(nn.Linear(6, 6), 0.9), torch.randn(4, 6)
    for _ in range(20):
        layer.weight.data += 0.05 * torch.randn(6, 6)
        layer(x)
    assert torch.linalg.matrix_norm(layer.bounded(), 2) <= 0.9 * 1.02


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inverse_at_nine_tenths_is_within_1e_6(kind: str, dtype: torch.dtype) -> None:
    blocks = [dense() for _ in range(8)] if kind == "linear" else [convolutional() for _ in range(8)]
    net = IResNet(stretched(blocks), coefficient=0.9).to(dtype).eval()
    x = torch.randn((16, 6) if kind == "linear" else (4, 4, 8, 8), dtype=dtype)
    y = net(x).detach()
    back, certificates = net.inverse(y)
    assert (back - x).norm() / x.norm() <= 1e-6
    assert [c.block for c in certificates] == list(range(7, -1, -1))
    assert all(0.5 < c.lipschitz < 1 and c.iterations <= c.needed and c.error_bound <= 1e-10 for c in certificates)
    if dtype == torch.float64:
        assert (back - x).norm() / x.norm() <= 1e-9


def test_the_certificate_holds_at_a_coarse_tolerance() -> None:
    net = IResNet(stretched([dense()]), coefficient=0.9).double().eval()
    x = torch.randn(32, 6, dtype=torch.float64)
    y = net(x).detach()
    for tolerance in (1e-1, 1e-3, 1e-6):
        back, (certificate,) = net.inverse(y, tolerance)
        scale = torch.maximum(x.norm(dim=1), y.norm(dim=1))
        assert ((back - x).norm(dim=1) / scale).max() <= certificate.error_bound * (1 + 1e-9) <= tolerance * (1 + 1e-9)


def test_needed_iterations_keep_their_promise() -> None:
    """g(x) = c·x contracts exactly as slowly as its bound says."""
    for c in (0.5, 0.9, 0.99):
        k = needed(c, 1.0, 1e-6)
        assert c**k / (1 - c) <= 1e-6 < c ** (k - 1) / (1 - c)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_slowest_contraction(sign: int) -> None:
    """g(x) = ±0.9 x: every iteration gains a factor 0.9 and no more, as the bound says."""
    linear = nn.Linear(3, 3, bias=False).double()
    linear.weight.data = sign * 2.0 * torch.eye(3).double()
    net, x = IResNet([nn.Sequential(linear)], coefficient=0.9).eval(), torch.randn(4, 3).double()
    back, (certificate,) = net.inverse(net(x).detach(), tolerance=1e-6)
    assert (back - x).norm() / x.norm() <= (1e-6 if sign == 1 else 1e-5)
    assert 100 < certificate.iterations <= certificate.needed < 200


def test_inverse_in_training_mode_uses_the_weights_of_the_last_forward() -> None:
    net, x = IResNet(stretched([dense() for _ in range(3)]), coefficient=0.7).double(), torch.randn(8, 6).double()
    for _ in range(5):
        y = net(x).detach()
    assert (net.inverse(y)[0] - x).norm() / x.norm() <= 1e-9


def test_it_takes_a_residual_networks_parameters() -> None:
    plain = nn.ModuleList(convolutional() for _ in range(3))
    net = IResNet([convolutional() for _ in range(3)])
    net.blocks.load_state_dict(plain.state_dict())
    assert net.blocks.state_dict().keys() == plain.state_dict().keys()


def test_what_cannot_be_proven_is_refused() -> None:
    net = IResNet(stretched([dense()]), coefficient=0.9).eval()
    for layer in net.blocks[0]:
        if isinstance(layer, BoundedLinear):
            layer.coefficient = 1.1
    with pytest.raises(ValueError, match=r"block 0 is bounded by .* only, which proves no inverse"):
        net.inverse(torch.randn(2, 6))
