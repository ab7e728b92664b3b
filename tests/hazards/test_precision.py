"""Precision: autocast, loss scaling, dtypes, large numbers, and ranges that follow training."""

import copy
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Mlp, float_recurrence

REPLAYING = ["reverse", "checkpoint"]


def same_bits(found: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_overflow_as_nan_lets_the_scaler_skip_the_step() -> None:
    """A block that overflows now and then in float16: NaN gradients, and the step is skipped."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    net = rg.MomentumNet(blocks, memory="reverse", overflow="nan")
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in net.parameters()]
    for scale, moved in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(3, 8) * scale).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)) != moved
    assert scaler.get_scale() == 4.0


@pytest.mark.slow
def test_scales_that_drift_a_hundredfold_over_a_thousand_steps() -> None:
    """The range follows, nothing overflows, and the bits stay those of stored activations."""
    nets = [rg.MomentumNet([Mlp() for _ in range(3)], memory=memory) for memory in ("store", "reverse")]
    nets[1].load_state_dict(nets[0].state_dict())
    x, bits, outputs = torch.randn(4, 8), [], []
    for _ in range(1000):
        x, found = x * 100 ** (1 / 1000), []
        for net in nets:
            with torch.no_grad():
                for block in net.blocks:
                    block.outer.weight.mul_(100 ** (1 / 1000))
            net.zero_grad()
            y = net(x)
            y.square().mean().backward()
            found.append([y.detach(), *(p.grad for p in net.parameters())])
        assert same_bits(found)
        assert nets[0].fixed_point == nets[1].fixed_point
        bits.append(nets[1].fixed_point.bits)
        outputs.append(float(y.detach().abs().max()))
    assert outputs[-1] > 50 * outputs[0]
    assert bits[-1] <= bits[0] - 5
    assert len(set(bits)) < 10, "the range moves rarely"


DTYPES = [(torch.float64, None), (torch.float32, None), (torch.bfloat16, None), (torch.float16, None)]
AUTOCAST = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]


@pytest.mark.parametrize(("dtype", "autocast"), DTYPES + AUTOCAST)
@pytest.mark.parametrize("memory", ["store", *REPLAYING])
def test_dtypes_are_those_of_plain_autograd(dtype: torch.dtype, autocast: torch.dtype | None, memory: str) -> None:
    blocks, found = [Mlp().to(dtype) for _ in range(3)], []
    net = rg.MomentumNet(copy.deepcopy(blocks), memory=memory)
    scale = torch.ones(8, dtype=dtype, requires_grad=True)
    for run in (lambda x: net(x), lambda x: float_recurrence(blocks, net.gamma, x)):
        x = torch.randn(3, 8, dtype=dtype).requires_grad_()
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            y = run(x * scale)
        y.float().sum().backward()
        assert x.grad is not None
        found.append((y.dtype, x.grad.dtype, y.shape, x.grad.shape))
    assert found[0] == found[1]
    pairs = zip(net.parameters(), nn.ModuleList(blocks).parameters(), strict=True)
    assert all(p.grad.dtype == q.grad.dtype == dtype for p, q in pairs)


@pytest.mark.parametrize("peak", [1e3, 1e5])
def test_massive_activations(peak: float) -> None:
    """A few channels at 1e5, as language models have: 27 bits below the peak are what the other channels are held to."""
    blocks = [nn.Sequential(nn.LayerNorm(64), Mlp(64, 64)) for _ in range(24)]
    x = torch.randn(4, 64)
    x[:, 5], x[:, 17] = peak, -0.3 * peak
    found = []
    for memory in ("store", *REPLAYING):
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=memory, verify="strict")
        net(x).square().mean().backward()
        found.append([p.grad for p in net.parameters()])
    assert same_bits(found)
    exact = [copy.deepcopy(b).double() for b in blocks]
    float_recurrence(exact, net.gamma, x.double()).square().mean().backward()
    errors = [
        float((g - p.grad).norm() / p.grad.norm())
        for g, p in zip(found[1], nn.ModuleList(exact).parameters(), strict=True)
    ]
    assert max(errors) < 100 * 2.0**-27 * peak


@pytest.mark.parametrize(
    ("ratio", "fixed_point", "percent"),
    [
        (1, "auto", None), (1e4, "auto", None), (1e5, "auto", 0.2), (1e6, "auto", 1.4), (1e8, "auto", 55),
        (1, rg.FixedPoint(8, torch.int32), 1.6), (1, rg.FixedPoint(12, torch.int32), None),
        (1, rg.FixedPoint(16, torch.int32), None),
        (1, "int16", None), (1e2, "int16", 11),
    ],
)  # fmt: skip
def test_channels_that_lose_percents_of_their_gradients_are_warned_of(
    ratio: float, fixed_point: object, percent: float | None
) -> None:
    """With the number, within a factor of ten of what is measured."""
    scale = torch.ones(16)
    scale[:8] *= ratio

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return 0.3 * scale * torch.tanh(self.linear(x / scale))

    torch.manual_seed(0)
    net = rg.MomentumNet([Scaled() for _ in range(4)], memory="reverse", fixed_point=fixed_point)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in (1, 1, 4, 16):  # other ranges, too: it is said once
            net(size * torch.randn(64, 16) * scale)
    texts = [str(w.message) for w in said if "channels of x" in str(w.message)]
    assert len(texts) == (percent is not None)
    if percent is not None:
        told = float(re.search(r"about ([\d.e+]+) %", texts[0]).group(1))  # type: ignore[union-attr]
        assert percent / 10 < told < 10 * percent
