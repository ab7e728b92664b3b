"""`measure`: one training step of any model, which is left as it was found."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retrograde as rg
from retrograde.memory import Report, Times, human, measure


def network(memory: str, depth: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth)]
    return rg.MomentumNet(blocks, gamma=0.9, memory=memory)


def peak(memory: str, depth: int) -> int:
    return measure(network(memory, depth), torch.randn(16, 8, 16, 16), repeats=1).peak


def test_peak_grows_with_depth_in_store_mode_and_not_in_reverse() -> None:
    element = 16 * 8 * 16 * 16
    assert peak("store", 16) - peak("store", 8) >= 8 * 3 * 4 * element  # conv, norm and ReLU each keep one
    assert peak("checkpoint", 16) - peak("checkpoint", 8) >= 8 * 4 * element
    assert peak("reverse", 16) - peak("reverse", 8) < 0.25 * element


def test_figures_of_a_known_model() -> None:
    model, x = nn.Linear(100, 50), torch.ones(10, 100)
    model.bias.requires_grad_(False)
    report = measure(model, x, loss=lambda y: y.sum(), repeats=3)
    assert report.parameters == 4 * (100 * 50 + 50)
    assert report.gradients == 4 * 100 * 50
    assert report.held == 4 * (10 * 50 + 1)  # the output, kept by us, and the loss
    assert report.peak >= report.held + report.gradients  # the new gradient, before it is added
    assert len(report.times.seconds) == 3
    assert torch.equal(report.output, model(x))
    assert not report.output.requires_grad


def test_the_model_is_left_as_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(8, 4, requires_grad=True)
    model(x).sum().backward()
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()], x.grad, torch.get_rng_state()))
    measure(model, x, repeats=2)
    state, grads, x_grad, rng = before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(x.grad, x_grad)
    assert torch.equal(torch.get_rng_state(), rng)
    with pytest.raises(ZeroDivisionError):
        measure(model, x, loss=lambda y: 1 / 0)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.weight * x * scale, "count": torch.tensor(1)}


def test_batches_of_several_inputs_and_outputs() -> None:
    x, scale = torch.ones(3), torch.tensor(5.0)
    for batch in [(x, scale), [x, scale], {"x": x, "scale": scale}]:
        assert torch.equal(measure(Scaled(), batch, repeats=1).output["y"], torch.full((3,), 10.0))


def test_works_without_grad_mode() -> None:
    with torch.no_grad():
        assert measure(nn.Linear(2, 2), torch.ones(1, 2), repeats=1).peak > 0


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (nn.Linear(2, 2), lambda y: y, r"scalar tensor; got a tensor of shape \(3, 2\)"),
        (nn.Linear(2, 2), lambda y: 1.0, "scalar tensor; got float"),
        (nn.Flatten(), None, "nothing that requires a gradient"),
    ],
)
def test_wrong_input(model: nn.Module, loss: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(model, torch.ones(3, 2), loss=loss)


class Argmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(1)


def test_an_output_without_floats_needs_a_loss() -> None:
    with pytest.raises(ValueError, match="no floating-point tensor but Tensor; pass loss="):
        measure(Argmax(), torch.ones(3, 2))


def test_the_given_loss_is_the_one_that_is_trained() -> None:
    target, seen = torch.zeros(3, 2), []

    def loss(y: torch.Tensor) -> torch.Tensor:
        seen.append(y.shape)
        return F.mse_loss(y, target)

    measure(nn.Linear(2, 2), torch.ones(3, 2), loss=loss, repeats=4, warmup=2)
    assert len(seen) == 2 + 1 + 1 + 4  # the allocator is asked once, and the system once


def test_report_reads_as_aligned_lines() -> None:
    report = Report(8_400_000, 1_200_000, 812, 812, Times((0.0123,)), None, 3_000_000)
    assert str(report).splitlines() == [
        "peak memory        8.4 MB",
        "from the system    3.0 MB",
        "held for backward  1.2 MB",
        "parameters         812 B",
        "gradients          812 B",
        "step time          12.3 ms (quartiles 12.3 ms to 12.3 ms, best 12.3 ms)",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (5e15, "5000.0 TB"),
        (-2e6, "-2.0 MB"),
    ],
)
def test_human(count: float, text: str) -> None:
    assert human(count) == text


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say")
def test_resident_memory_sees_what_the_allocator_does_not() -> None:
    """Here: memory of NumPy, which is no tensor. A step that stores activations makes the process grow by about them."""

    class Beside(nn.Module):
        def __init__(self, megabytes: int) -> None:
            super().__init__()
            self.linear, self.megabytes = nn.Linear(4, 4), megabytes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            np.ones(self.megabytes * 125_000).sum()
            y: torch.Tensor = self.linear(x)
            return y

    reports = [measure(Beside(n), torch.ones(2, 4), repeats=1) for n in (0, 200)]
    assert reports[0].peak == reports[1].peak
    small, large = (report.resident or 0 for report in reports)
    assert 150e6 < large - small < 250e6
    assert "from the system" in str(reports[1])
