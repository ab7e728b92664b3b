"""ODE blocks against SciPy, against closed forms, and adjoint against direct gradients."""

import sys

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from problems import Mlp, fitted
from retrograde.nets.ode import EXPLICIT, FIXED_STEP, AugmentedODE, NeuralODE, SecondOrderODE, solvers
from retrograde.theory import psi

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
DOUBLE = {"dtype": torch.float64}


@pytest.mark.parametrize("eps", [0.2, 1.0, 10.0])
@pytest.mark.parametrize("velocity", [None, "first"])
def test_second_order_agrees_with_scipy(eps: float, velocity: str | None) -> None:
    f, x = Mlp(3, 6).double(), torch.randn(4, 3, **DOUBLE)
    ours = SecondOrderODE(f, eps, velocity=velocity, horizon=1.5, **TIGHT)
    with torch.no_grad():
        found = torch.cat([part.flatten() for part in ours.encode(x)]).numpy()
        v0 = f(x) if velocity else torch.zeros_like(x)

        def derivative(_: float, state: np.ndarray) -> np.ndarray:
            x, v = torch.from_numpy(state).view(2, 4, 3)
            return torch.stack([v, (f(x) - v) / eps]).flatten().numpy()

        start = torch.stack([x, v0]).flatten().numpy()
        theirs = solve_ivp(derivative, (0, 1.5), start, method="DOP853", rtol=1e-10, atol=1e-12).y[:, -1]
    assert np.abs(found - theirs).max() / np.abs(theirs).max() <= 1e-6


def test_second_order_linear_is_psi() -> None:
    f = nn.Linear(4, 4, bias=False).double()
    x = torch.randn(5, 4, **DOUBLE)
    exact = x @ psi(f.weight.detach(), eps=0.7).t()
    torch.testing.assert_close(SecondOrderODE(f, 0.7, **TIGHT)(x), exact, rtol=1e-7, atol=1e-8)


def test_first_order_linear_is_the_exponential() -> None:
    f = nn.Linear(4, 4, bias=False).double()
    x = torch.randn(5, 4, **DOUBLE)
    exact = x @ torch.linalg.matrix_exp(2 * f.weight).t()
    torch.testing.assert_close(NeuralODE(f, horizon=2.0, **TIGHT)(x), exact, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kind", ["first", "augmented", "second"])
def test_the_adjoint_gradient_is_the_direct_one(kind: str) -> None:
    f, x = Mlp(4 if kind != "augmented" else 6, 5).double(), torch.randn(3, 4, **DOUBLE)
    found = []
    for gradient in ("adjoint", "direct"):
        block = {
            "first": lambda g: NeuralODE(f, gradient=g, **TIGHT),
            "augmented": lambda g: AugmentedODE(f, 2, gradient=g, **TIGHT),
            "second": lambda g: SecondOrderODE(f, 0.5, velocity="first", gradient=g, **TIGHT),
        }[kind](gradient)
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(block(leaf).square().sum(), [leaf, *f.parameters()]))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() / b.norm() <= 1e-6
        assert b.any()


@pytest.mark.parametrize("solver", [name for name in solvers() if name != "scipy_solver"])
def test_every_solver(solver: str) -> None:
    f, x = Mlp(3, 5).double(), torch.randn(2, 3, **DOUBLE)
    exact = SecondOrderODE(f, 0.5, **TIGHT)(x)
    steps = 60 if solver in FIXED_STEP else None
    options = (
        {"max_order": 4} if "adams" in solver else None
    )  # the default of 12 is unstable where corrections are not made
    block = SecondOrderODE(f, 0.5, solver=solver, steps=steps, rtol=1e-4, atol=1e-4, options=options)
    assert (block(x) - exact).norm() / exact.norm() < (2e-2 if solver in ("euler", "fehlberg2") else 1e-3)
    block(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in f.parameters())


@pytest.mark.parametrize("solver", EXPLICIT)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_explicit_solvers_are_torchdiffeqs(solver: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, **DOUBLE)
    for kind in (NeuralODE, lambda f, **s: SecondOrderODE(f, 0.7, velocity="first", **s)):
        f, found = Mlp(3, 5).double(), []
        for _ in range(2):
            block = kind(f, solver=solver, steps=steps, gradient="direct", horizon=0.8)
            encode = block.encode if isinstance(block, SecondOrderODE) else block
            leaf = x.clone().requires_grad_()
            y = encode(leaf)
            out = torch.cat(y) if isinstance(y, tuple) else y
            found.append([out, block.inverse(y), *torch.autograd.grad(out.square().sum(), [leaf, *f.parameters()])])
            monkeypatch.setattr("retrograde.nets.ode.EXPLICIT", {})  # the second time by torchdiffeq
        monkeypatch.undo()
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_explicit_solvers_ask_nothing_of_torchdiffeq(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares times on the device, which a CUDA graph cannot be made of."""
    block = SecondOrderODE(Mlp(3, 5), solver="rk4", steps=2, gradient="direct")
    monkeypatch.setattr("retrograde.nets.ode._torchdiffeq", None)
    block(torch.randn(2, 3)).sum().backward()


class Timed(NeuralODE):
    """ẋ = f(x) + t²"""

    def derivative(self, t: Tensor, state: Tensor) -> Tensor:
        return super().derivative(t, state) + t**2


@pytest.mark.parametrize("solver", EXPLICIT)
def test_explicit_solvers_tell_the_time(solver: str) -> None:
    f, x = Mlp(3, 5).double(), torch.randn(4, 3, **DOUBLE)
    ours, theirs = (Timed(f, solver=solver, steps=3, gradient=g, horizon=0.8) for g in ("direct", "adjoint"))
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ours.inverse(x), theirs.inverse(x), rtol=1e-12, atol=1e-13)


def test_scipys_solver_through_torchdiffeq() -> None:
    f, x = Mlp(3, 5).double(), torch.randn(2, 3, **DOUBLE)
    block = NeuralODE(f, solver="scipy_solver", options={"solver": "LSODA"}, gradient="direct")
    with torch.no_grad():
        torch.testing.assert_close(block(x), NeuralODE(f, **TIGHT)(x), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_inverses_are_right_to_the_solvers_tolerance() -> None:
    x = torch.randn(4, 3, **DOUBLE)
    for tolerance in (1e-5, 1e-9):
        settings = {"rtol": tolerance, "atol": tolerance}
        first, second = NeuralODE(Mlp(3, 5).double(), **settings), SecondOrderODE(Mlp(3, 5).double(), 1.0, **settings)
        wide = AugmentedODE(Mlp(5, 5).double(), 2, **settings)
        pairs = ((first, first.forward), (second, second.encode), (wide, wide.forward))
        errors = [float((block.inverse(encode(x)) - x).norm() / x.norm()) for block, encode in pairs]
        assert 0 < max(errors) <= 200 * tolerance


def test_adjoint_memory_does_not_grow_with_the_steps() -> None:
    """Direct: it does, so the same test fails for it."""
    from retrograde.memory import held_bytes

    f, x = Mlp(8, 8), torch.randn(1_024, 8)
    growth = {}
    for gradient in ("adjoint", "direct"):
        held = [
            held_bytes(lambda: SecondOrderODE(f, 1.0, solver="rk4", steps=n, gradient=gradient)(x).sum())  # noqa: B023
            for n in (5, 20)
        ]
        growth[gradient] = held[1] / held[0]
    assert growth["adjoint"] < 1.1
    assert growth["direct"] > 3


def test_the_second_order_block_learns_a_crossing_that_the_first_cannot() -> None:
    """x ↦ −x in one dimension: first-order trajectories would have to cross."""
    x, losses = torch.linspace(-1, 1, 21)[:, None], {}
    for order in ("first", "second"):
        f, settings = Mlp(1, 16), {"solver": "midpoint", "steps": 6, "gradient": "direct"}
        block = (
            NeuralODE(f, **settings) if order == "first" else SecondOrderODE(f, velocity=nn.Linear(1, 1), **settings)
        )
        losses[order] = fitted(block, lambda block=block: (block(x) + x).square().mean(), 5e-2, 80)[-1]
    assert losses["second"] < 0.1 < 0.2 < losses["first"]


def test_without_torchdiffeq_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"retrograde\[ode\]"):
        NeuralODE(nn.Linear(3, 3))


def test_images() -> None:
    block = SecondOrderODE(nn.Conv2d(2, 2, 3, padding=1), 1.0, velocity=nn.Conv2d(2, 2, 1))
    x = torch.randn(2, 2, 5, 5)
    y: Tensor = block(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert all(p.grad is not None for p in block.parameters())


def test_two_blocks_of_half_the_horizon_are_one_where_the_velocity_is_carried() -> None:
    f, x = Mlp(3, 5).double(), torch.randn(4, 3, dtype=torch.float64)
    whole = SecondOrderODE(f, 0.7, velocity="first", horizon=2.0, **TIGHT)
    half = SecondOrderODE(f, 0.7, velocity="first", horizon=1.0, **TIGHT)
    for found, wanted in zip(half.encode(*half.encode(x)), whole.encode(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(half(half(x)), whole(x), rtol=1e-3)  # the velocity is lost in between
    still = half.encode(x, torch.zeros_like(x))
    torch.testing.assert_close(still, SecondOrderODE(f, 0.7, horizon=1.0, **TIGHT).encode(x), rtol=1e-12, atol=1e-12)
