"""Secs. 3 and 4, App. A and B: every proposition, lemma and theorem, checked in numbers.

Each unit is a statement. `retrograde.theory` has it as a function; here it is held against an independent computation on random
cases, and the largest error against a bound chosen beforehand. What is proved is not proved again: a statement
that were misread, or a function that were wrong, would show.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from retrograde import theory

from .config import Settings
from .findings import Finding
from .metrics import Key, Record
from .run import Context
from .style import BLUE, GREY, ORANGE, canvas

Check = Callable[[int], tuple[float, float]]
EPS = (0.1, 0.5, 1.0, 2.0, 10.0)


@dataclass(frozen=True)
class Config(Settings):
    cases: int = 200  # random ones of each statement

    @classmethod
    def smoke(cls) -> Config:
        return cls(cases=10)

    def setting(self) -> str:
        return f"{len(CHECKS)} statements, up to {self.cases} random cases each, float64."


def units(config: Config) -> list[Key]:
    return [{"statement": name} for name in CHECKS]


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    error, bound = CHECKS[unit["statement"]](config.cases)
    return {"error": float(error), "bound": float(bound)}


def _pairs(cases: int) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(d, d)), draw.normal(size=(d, d))) for d in draw.integers(1, 7, cases)]


def _revnets_repel(cases: int) -> tuple[float, float]:
    """λ is an eigenvalue of J(A, B), |λ| ≥ 1, λ ≠ 1."""
    worst = 0.0
    for A, B in _pairs(cases):
        found, J = theory.revnet_eigenvalue(A, B), theory.revnet_jacobian(A, B)
        assert found != 1
        gap = np.linalg.svd(J - found * np.eye(len(J)), compute_uv=False)[-1] / np.linalg.norm(J)
        worst = max(worst, gap, 1 - abs(found))
    return worst, 1e-12


def _continuous_revnets_repel(cases: int) -> tuple[float, float]:
    """The eigenvalues of (0, A; B, 0) are the square roots of those of AB: not all have a real part below 0."""
    worst = 0.0
    for A, B in _pairs(cases):
        found = np.linalg.eigvals(np.block([[np.zeros_like(A), A], [B, np.zeros_like(A)]]))
        roots = np.sqrt(np.linalg.eigvals(A @ B).astype(complex))
        gaps = np.abs(found[:, None] - np.concatenate([roots, -roots])[None]).min(1) / np.abs(found).max()
        worst = max(worst, gaps.max(), -found.real.max())
    return worst, 1e-6  # a square root doubles the error of a small eigenvalue


def _momentum_attracts(cases: int) -> tuple[float, float]:
    """The ellipse and the spectral radius agree, and f(x) = −x attracts for every γ < 1."""
    draw, wrong = np.random.default_rng(1), 0
    for _ in range(cases):
        A, gamma = draw.normal(size=(3, 3)) - 2 * np.eye(3), draw.uniform(0.05, 0.99)
        radius = theory.spectral_radius(theory.momentum_jacobian(A, gamma))
        wrong += abs(radius - 1) > 1e-9 and theory.is_attracting(A, gamma) != (radius < 1)
        wrong += not theory.is_attracting(-np.eye(2), gamma)
    return wrong + theory.is_attracting(-np.eye(2), 1.0), 0


def _gap_falls(gap: Callable[..., float], one: float, ten: float) -> float:
    """How far the gap's fall over a factor of ten is from a factor of ten, in decades."""
    falls = [gap(np.sin, [1.0], [v0], one) / gap(np.sin, [1.0], [v0], ten) for v0 in (-1.0, 0.0, 2.0)]
    return max(abs(math.log10(fall) - 1) for fall in falls)


def _embeds(cases: int) -> tuple[float, float]:
    """Solutions of ẋ = f(x) solve the second-order model of f̂."""
    worst, times = 0.0, np.linspace(0, 1, 9)
    for eps in EPS:
        f_hat = theory.embed_first_order(lambda t, x: torch.sin(x), eps)

        def field(x: Any, f_hat: Any = f_hat) -> Any:
            return f_hat(torch.zeros((), dtype=torch.float64), torch.as_tensor(x, dtype=torch.float64)).numpy()

        first = theory.first_order_flow(np.sin, [0.7], times)
        worst = max(worst, np.abs(theory.second_order_flow(field, [0.7], np.sin([0.7]), eps, times) - first).max())
    return worst, 1e-6


def _psi(cases: int) -> tuple[float, float]:
    """Ψ_ε(θ) is the upper left block of the exponential of the system in phase space."""
    draw, worst = np.random.default_rng(2), 0.0
    for _ in range(cases):
        d, eps = int(draw.integers(1, 6)), float(draw.choice(EPS))
        theta = draw.normal(size=(d, d))
        system = np.block([[np.zeros((d, d)), np.eye(d)], [theta / eps, -np.eye(d) / eps]])
        exact = expm(system)[:d, :d]
        worst = max(worst, float(np.linalg.norm(theory.psi(theta, eps) - exact) / np.linalg.norm(exact)))
    return worst, 1e-11


def _theorem(cases: int) -> tuple[float, float]:
    """θ is constructed wherever the theorem says yes, and nowhere else. Eigenvalues near λ_ε and in pairs are among the cases."""
    draw, worst = np.random.default_rng(3), 0.0
    for _ in range(cases):
        eps = float(draw.choice(EPS))
        low = float(theory.lambda_min(eps))
        values = draw.choice([low - 0.2, low - 0.1, low + 0.1, -0.5 * low, 1.0], 4)
        Q = np.linalg.qr(draw.normal(size=(4, 4)))[0]
        D = Q @ np.diag(values) @ Q.T
        possible = not (np.unique(values[values < low], return_counts=True)[1] % 2).any()
        try:
            X = theory.represent(D, eps)
            worst = max(worst, float(np.linalg.norm(theory.psi(X, eps) - D) / np.linalg.norm(D)))
            worst += not possible
        except ValueError:
            worst += possible
    return worst, 1e-8


def _up_to_scale(cases: int) -> tuple[float, float]:
    """αA is representable for α up to the largest, and not 1 % beyond it."""
    draw, wrong = np.random.default_rng(4), 0
    for _ in range(cases):
        eps, values = float(draw.choice(EPS)), draw.normal(size=3)
        A = np.diag(values)
        most = theory.largest_multiple(A, eps)
        if math.isfinite(most):
            wrong += theory.is_representable(1.01 * most * A, eps)
        wrong += not theory.is_representable(0.99 * min(most, 1e3) * A, eps)
    return wrong, 0


def _F(z: complex, eps: float) -> complex:
    """f_ε(z²) = e^{−1/2ε}(cosh z + sinh z / 2εz)."""
    return cmath.exp(-0.5 / eps) * (cmath.cosh(z) + (cmath.sinh(z) / z if z else 1) / (2 * eps))


def _F_slope(z: complex, eps: float) -> complex:
    return cmath.exp(-0.5 / eps) * (cmath.sinh(z) + (cmath.cosh(z) / z - cmath.sinh(z) / z**2) / (2 * eps))


def _surjective(cases: int) -> tuple[float, float]:
    """Lemma 1: for every complex w there is a z with f_ε(z) = w, found by Newton's method from several starts."""
    draw, worst = np.random.default_rng(5), 0.0
    for _ in range(cases):
        eps = float(draw.choice(EPS))
        w = complex(*draw.normal(scale=3, size=2)) * math.exp(-0.5 / eps)
        worst = max(worst, min(_newton(complex(a, b), w, eps) for a in (0.5, 2.0) for b in (-2.0, -0.7, 0.7, 2.0, 4.0)))
    return worst, 1e-12


def _newton(z: complex, w: complex, eps: float) -> float:
    """|f_ε(z²) − w| / |w| where the steps end."""
    try:
        for _ in range(60):
            z -= (_F(z, eps) - w) / _F_slope(z, eps)
        return abs(_F(z, eps) - w) / abs(w)
    except (OverflowError, ZeroDivisionError):
        return math.inf


def _slope_has_real_zeros(cases: int) -> tuple[float, float]:
    """Lemma 2: G_ε' has no zero off the real axis: it does not wind around 0 along a rectangle in the upper half-plane."""
    turns = 0.0
    for eps in EPS:
        for low, high in ((0.01, 1.0), (1.0, 12.0)):
            corners = (
                complex(-20.3, low),
                complex(20.3, low),
                complex(20.3, high),
                complex(-20.3, high),
                complex(-20.3, low),
            )
            path = np.concatenate([np.linspace(a, b, 40_000) for a, b in pairwise(corners)])
            a = 0.5 / eps
            values = -np.sin(path) + a * (np.cos(path) / path - np.sin(path) / path**2)
            turns = max(turns, abs(np.diff(np.unwrap(np.angle(values))).sum()) / (2 * math.pi))
    return turns, 1e-6


def _cross(cases: int) -> tuple[float, float]:
    """x₀ e^{−t/2} cos(t/2) solves ẍ + ẋ = −x/2, and all of them meet at π."""
    times = np.linspace(0, 4, 17)
    flow = theory.second_order_flow(lambda x: -x / 2, [1.5], [-0.75], 1.0, times)[:, 0]
    apart = max(abs(theory.crossing(1.5, t) - x) for t, x in zip(times, flow, strict=True))
    return max(apart, *(abs(theory.crossing(x0, math.pi)) for x0 in (-3.0, 1.0, 5.0))), 1e-6


def _free_velocity(cases: int) -> tuple[float, float]:
    worst = 0.0
    for eps in EPS:
        v0, (on_x, on_v) = theory.universal_velocity(lambda x: -(x**3), eps), theory.linear_flow([[0.0]], eps)
        worst = max(worst, *(abs((on_x * x + on_v * v0(x)).item() + x**3) for x in np.linspace(-2, 2, 9)))
    return worst, 1e-12


def _obstructed(cases: int) -> tuple[float, float]:
    """x ↦ λx with λ ≤ −1, and x ↦ −x³ at 1, are refuted; λ > −1 is not."""
    draw, wrong = np.random.default_rng(6), theory.obstruction(lambda x: -(x**3), [1.0]) != 1.0
    for lam in draw.uniform(-3, 1, cases):
        wrong += (theory.obstruction(float(lam).__mul__, [0.5, 1.0]) is not None) != (lam <= -1)
    return wrong, 0


def _negative(cases: int) -> tuple[float, float]:
    """−e^{−1/2ε} is reached; and every λ > −1 is, by an ε large enough."""
    worst = 0.0
    for eps in EPS:
        theta, value = theory.sign_flip(eps)
        worst = max(worst, abs(theory.psi([[theta]], eps).item() - value))
    for lam in np.random.default_rng(7).uniform(-0.999, 0, cases):
        worst += not theory.is_representable([[lam]], 1e4)
    return worst, 1e-12


def _field(draw: Any) -> Callable[[Any], Any]:
    W1, W2, b = draw.normal(size=(8, 2)), draw.normal(size=(2, 8)), draw.normal(size=8)
    return lambda x: W2 @ np.tanh(W1 @ x + b)


def _orientation(cases: int) -> tuple[float, float]:
    """B.5: along a flow the determinant of ∂Φ_t/∂x starts at 1 and stays above 0, and Φ_t moves by at most h · max ‖f‖ in h."""
    draw, worst, h = np.random.default_rng(8), 0.0, 1e-5
    for _ in range(max(1, cases // 10)):
        f, x = _field(draw), draw.normal(size=2)
        starts = np.stack([x, x + [h, 0], x + [0, h]])

        def field(t: float, z: Any, f: Any = f) -> Any:
            return np.concatenate([f(p) for p in z.reshape(3, 2)])

        flow = solve_ivp(
            field, (0, 1), starts.ravel(), rtol=1e-10, atol=1e-12,
            t_eval=np.linspace(0, 1, 33),
        ).y.T.reshape(-1, 3, 2)  # fmt: skip
        determinants = np.linalg.det((flow[:, 1:] - flow[:, :1]).transpose(0, 2, 1) / h)
        moved = np.abs(np.diff(flow[:, 0], axis=0)).max() / (max(np.abs(f(p)).max() for p in flow[:, 0]) / 32)
        worst = max(worst, -determinants.min(), moved - 1.05)  # the largest |f| is taken on a grid
    return worst, 0


def _linear_alone(cases: int) -> tuple[float, float]:
    """B.6: in one dimension Φ₁(x)/x is constant for f = θx, and for no f = θx + c sin x of the cases, whose |c| is 0.2 at least."""
    draw, worst = np.random.default_rng(9), 0.0
    for _ in range(max(1, cases // 10)):
        theta, c = draw.uniform(-1, 1), draw.choice([-1, 1]) * draw.uniform(0.2, 1)
        for push, linear in ((0.0, True), (c, False)):

            def f(x: Any, push: float = push, theta: float = theta) -> Any:
                return theta * x + push * np.sin(x)

            ratios = [theory.first_order_flow(f, [x], [1.0])[0, 0] / x for x in (0.3, 1.0, 3.0)]
            uneven = max(ratios) / min(ratios) - 1
            worst = max(worst, uneven if linear else (uneven < 1e-2))
    return worst, 1e-6


def _no_logarithm(cases: int) -> tuple[float, float]:
    """B.7: diag(−1, −λ), λ ≠ 1, has a positive determinant and no real square root, and is within reach at ε > 0 up to scale."""
    wrong = 0
    for lam in np.random.default_rng(10).uniform(0.05, 0.95, cases):
        pair = theory.negative_pair(float(lam))
        wrong += bool(torch.linalg.det(pair) <= 0) + theory.is_representable(pair, 0.0)
        wrong += not theory.is_representable(0.99 * theory.largest_multiple(pair, 1.0) * pair, 1.0)
    return wrong, 0


def _gradients(cases: int) -> tuple[float, float]:
    """App. D: the transposed Jacobian of a step in (x, v) is the paper's."""
    worst, gamma = 0.0, 0.9
    torch.manual_seed(0)
    f = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

    def step(z: Any) -> Any:
        v = gamma * z[3:] + (1 - gamma) * f(z[:3])
        return torch.cat([z[:3] + v, v])

    for _ in range(min(cases, 20)):
        z = torch.randn(6, dtype=torch.float64)
        J = (1 - gamma) * torch.autograd.functional.jacobian(f, z[:3])
        eye = torch.eye(3, dtype=torch.float64)
        paper = torch.cat([torch.cat([eye + J, gamma * eye], 1), torch.cat([J, gamma * eye], 1)])
        worst = max(worst, float((torch.autograd.functional.jacobian(step, z) - paper).abs().max()))
    return worst, 1e-14


CHECKS: dict[str, Check] = {
    "Prop. 1: RevNets repel": _revnets_repel,
    "Prop. 1, remark: so do continuous ones": _continuous_revnets_repel,
    "Sec. 3.3: Momentum ResNets attract": _momentum_attracts,
    "Prop. 2: ε → 0, any v₀": lambda cases: (_gap_falls(theory.first_order_gap, 1e-2, 1e-3), 0.1),
    "Sec. 4.2: trajectories cross": _cross,
    "Prop. 3: first-order models embed": _embeds,
    "Prop. 4: Ψ_ε": _psi,
    "Theorem 1: what is representable": _theorem,
    "Sec. 4.3: any mapping up to scale": _up_to_scale,
    "Lemma 1: f_ε is surjective on ℂ": _surjective,
    "Lemma 2: f_ε′ ≠ 0 off the real axis": _slope_has_real_zeros,
    "App. B.1: ε → ∞": lambda cases: (_gap_falls(theory.frictionless_gap, 1e2, 1e3), 0.1),
    "App. B.2: with v₀ free, anything": _free_velocity,
    "App. B.3: with v₀ = 0, not λ ≤ −1": _obstructed,
    "App. B.4: with v₀ = 0, all λ > −1": _negative,
    "App. B.5: first order keeps orientation": _orientation,
    "App. B.6: linear maps come from linear f": _linear_alone,
    "App. B.7: diag(−1, −λ)": _no_logarithm,
    "App. D: gradients of a step": _gradients,
}


def figure(config: Config, records: list[Record]) -> Any:
    """Left: errors beside their bounds. Right: the paper's figure of App. B.7, the crossing that cannot be."""
    picture, (left, right) = canvas(10, 5.2, 1, 2, width_ratios=(1.3, 1))
    names = [r["statement"] for r in records]
    floor = 1e-17
    for k, record in enumerate(records):
        left.plot(max(record["error"], floor), k, "o", color=BLUE)
        left.plot(max(record["bound"], floor), k, "|", color=ORANGE, ms=11, mew=2)
    left.set_yticks(range(len(names)), names, fontsize=8.5)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="largest error (dot) and its bound (bar); at the left end: 0", xlim=(floor / 3, 3))
    left.grid(axis="x", alpha=0.25)
    _draw_paradox(right)
    return picture


def _draw_paradox(axis: Any, lam: float = 0.75) -> None:
    """(0, 1) ↦ (0, −λ) ↦ (0, λ²) in two units of time; a trajectory would pass (x, 0) at t₀ and again at t₀ + 2."""
    from scipy.interpolate import CubicSpline

    knots = np.array([[0, 1], [0.55, 0], [0, -lam], [-0.55, 0], [0, lam**2], [0.55, 0]])
    curve = CubicSpline([0, 0.5, 1, 1.5, 2, 2.5], knots)
    for (start, end), colour, name in (((0, 2), BLUE, "from (0, 1)"), ((2, 2.5), ORANGE, "from (0, λ²)")):
        axis.plot(*curve(np.linspace(start, end, 200)).T, color=colour, label=name)
    points = (("(0, 1)", 0), ("(0, −λ)", 2), ("(0, λ²)", 4), ("(x, 0)", 1), ("(−x, 0)", 3))
    for name, k in points:
        axis.plot(*knots[k], "o", color="#111827", zorder=4)
        axis.annotate(name, knots[k], (5, 5), textcoords="offset points", fontsize=9)
    axis.axhline(0, color=GREY, lw=0.6)
    axis.axvline(0, color=GREY, lw=0.6)
    axis.set(title="App. B.7: both would pass (x, 0)", xlabel="x₁", ylabel="x₂")
    axis.legend(loc="center", bbox_to_anchor=(0.5, 0.3))


def findings(config: Config, records: list[Record]) -> list[Finding]:
    return [
        Finding(r["statement"], f"{r['error']:.1e}", f"error ≤ {r['bound']:g}", r["error"] <= r["bound"])
        for r in records
    ]
