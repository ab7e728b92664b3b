"""Continuous and discrete agree: a Momentum ResNet with step h = T/N tends to the second-order ODE as N grows.

`retrograde.nets.discretised` is that network. It is of first order: its distance to `SecondOrderODE` at time T halves as N
doubles, a slope of 1 in log–log [sander2021, Sec. 3.4].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from retrograde.nets import SecondOrderODE, discretised


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
