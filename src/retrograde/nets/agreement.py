"""Continuous and discrete agree: a Momentum ResNet with step h = T/N tends to the second-order ODE as N grows.

    ε ẍ + ẋ = f(x)        →        w ← (1 − h/ε)·w + (h/ε)·h·f(x)        x ← x + w,        w = h·ẋ

so it is a `MomentumNet` with γ = 1 − h/ε and blocks h·f [sander2021, Sec. 3.4]; at h = 1 the paper's ε = 1/(1 − γ). The scheme is
of first order: the distance at time T halves as N doubles, a slope of 1 in log–log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic.ratio import NARROW
from .hamiltonian import Kick
from .inputs import positive, whole
from .momentum import MomentumNet
from .ode import SecondOrderODE


@dataclass(frozen=True)
class Agreement:
    """Distance between Momentum ResNets of several depths and the ODE that they discretise."""

    steps: tuple[int, ...]
    errors: tuple[float, ...]  # ‖x_N − x(T)‖ / ‖x(T)‖
    slope: float  # of −log(error) over log(N), by least squares

    def __str__(self) -> str:
        lines = [
            f"{'N':>6}  {'error':>10}",
            *(f"{n:6d}  {e:10.3e}" for n, e in zip(self.steps, self.errors, strict=True)),
        ]
        return "\n".join([*lines, f"slope {self.slope:.3f}"])


def discretised(
    f: nn.Module, eps: float, steps: int, horizon: float = 1.0, *,
    velocity: str | Callable[[Tensor], Tensor] | None = None, **options: Any,
) -> MomentumNet:  # fmt: skip
    """The Momentum ResNet with `steps` layers that discretises ε ẍ + ẋ = f(x) on [0, T]; f is shared by all layers.

    Raises:
        ValueError: if the step is so large that γ = 1 − T/(N ε) is not above 0.
    """
    eps, horizon = positive("eps", eps, why="ε = 0 is a ResNet."), positive("horizon", horizon)
    T, e = (Fraction(number).limit_denominator(10**6) for number in (horizon, eps))  # 0.1 means 1/10
    gamma = 1 - T / (whole("steps", steps) * e) if e else Fraction(0)
    if gamma <= 0:
        raise ValueError(
            f"{steps} steps for eps={eps:g} over {horizon:g} give gamma = 1 − T/(N·eps) = {float(gamma):.3g}; it must be above 0: "
            f"take more than {math.floor(horizon / eps)} steps."
        )
    h = horizon / steps
    v0 = f if velocity == "first" else velocity
    if v0 is not None and not callable(v0):
        raise ValueError(f"velocity must be None, 'first', or a module or function of x; got {velocity!r}.")
    ratio: Any = gamma if gamma.denominator < NARROW else float(gamma)
    return MomentumNet([Kick(f, h)] * steps, ratio, velocity=None if v0 is None else Kick(v0, h), **options)


@torch.no_grad()
def agreement(
    f: nn.Module, x: Tensor, eps: float, steps: Sequence[int] = (16, 32, 64, 128, 256, 512), horizon: float = 1.0, *,
    velocity: str | Callable[[Tensor], Tensor] | None = None,
) -> Agreement:  # fmt: skip
    """Measure how Momentum ResNets approach the ODE as their depth grows. Take x and f in float64.

    Args:
        f: a module of x, the same at all times.
        x: where all of them start.
        eps: ε of the ODE.
        steps: the depths N, two or more.
        horizon: T.
        velocity: ẋ(0), as in `SecondOrderODE`.
    """
    if len(set(steps)) < 2:
        raise ValueError(f"a slope needs two depths or more; got steps={tuple(steps)}.")
    ode = SecondOrderODE(f, eps, velocity=velocity, horizon=horizon, solver="dopri8", rtol=1e-11, atol=1e-13)
    exact = ode(x)
    errors = [
        float((discretised(f, eps, n, horizon, velocity=velocity)(x) - exact).norm() / exact.norm()) for n in steps
    ]
    logs = torch.tensor([[math.log(n), 1.0] for n in steps], dtype=torch.float64)
    ordinates = torch.tensor(errors, dtype=torch.float64).log()
    slope = -torch.linalg.lstsq(logs, ordinates[:, None]).solution[0, 0]
    return Agreement(tuple(steps), tuple(errors), float(slope))
