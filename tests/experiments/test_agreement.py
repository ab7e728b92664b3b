"""A Momentum ResNet with step T/N tends to the second-order ODE at first order."""

import pytest
import torch
from torch import nn

from problems import Mlp
from retrograde.nets import discretised
from retrograde.theory import psi
from retrograde_experiments.agreement import agreement


@pytest.mark.parametrize("eps", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("velocity", [None, "first"])
def test_the_slope_is_one(eps: float, velocity: str | None) -> None:
    f, x = Mlp(3, 6).double(), torch.randn(4, 3, dtype=torch.float64)
    found = agreement(f, x, eps, steps=(128, 256, 512), velocity=velocity)
    assert found.slope == pytest.approx(1, abs=0.06)
    assert list(found.errors) == sorted(found.errors, reverse=True)
    assert found.errors[-1] < 5e-3
    assert f"slope {found.slope:.3f}" in str(found)


def test_against_the_closed_form() -> None:
    """Linear f: the limit is Ψ_ε, whatever solver one trusts."""
    f, x = nn.Linear(4, 4, bias=False).double(), torch.randn(5, 4, dtype=torch.float64)
    exact = x @ psi(f.weight.detach(), eps=1.0).t()
    with torch.no_grad():
        errors = [(discretised(f, 1.0, n)(x) - exact).norm() / exact.norm() for n in (200, 400)]
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.02)


def test_the_papers_matching() -> None:
    """Step 1 per layer: ε = 1/(1 − γ)."""
    net = discretised(Mlp(), eps=10.0, steps=4, horizon=4.0)
    assert net.gamma == pytest.approx(0.9)
    assert net.blocks[0].factor == 1


def test_a_wrong_gamma_does_not_converge() -> None:
    f, x = Mlp(3, 6).double(), torch.randn(4, 3, dtype=torch.float64)
    right = agreement(f, x, 1.0, steps=(64, 128))
    with torch.no_grad():
        wrong = discretised(f, 2.0, 128)(x)
        assert (wrong - discretised(f, 1.0, 128)(x)).norm() / wrong.norm() > 5 * right.errors[-1]


def test_wrong_input() -> None:
    f = Mlp()
    with pytest.raises(ValueError, match=r"must be above 0: take more than 10 steps"):
        discretised(f, eps=0.1, steps=10)
    with pytest.raises(ValueError, match="eps must be above 0"):
        discretised(f, eps=0, steps=10)
    with pytest.raises(ValueError, match="two depths"):
        agreement(f, torch.ones(1, 8), 1.0, steps=(4,))
    with pytest.raises(ValueError, match="velocity"):
        discretised(f, 1.0, 10, velocity="fast")
