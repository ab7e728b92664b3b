"""ODE blocks: a network's depth as time [chen2018; dupont2019; sander2021, Sec. 2 and eq. 6].

    NeuralODE         ẋ = f(x)                        x(0) ↦ x(T)
    AugmentedODE      the same on (x, 0): more dimensions, so that trajectories may pass each other
    SecondOrderODE    ε ẍ + ẋ = f(x)                  as ẋ = v, v̇ = (f(x) − v) / ε; the limit of Momentum ResNets
    discretised       the Momentum ResNet with N steps of h = T/N; the distance to the ODE halves as N doubles

The solvers are torchdiffeq's. Gradients come from the adjoint ODE, in memory that does not depend on the number of steps, or
directly from the solver's own operations. For direct gradients the simplest fixed-step solvers run here, because torchdiffeq
compares times on the device at every step and waits for the result. The inverse integrates from T back to 0: right to the
solver's tolerance (times the growth of the backward flow), never to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import require
from .checks import check_finite, choice, positive, whole
from .hamiltonian import Kick
from .momentum import MomentumNet

FIXED_STEP = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")
EXPLICIT = {  # the stages, each by the ones before it, and the step by all of them, as torchdiffeq has them
    "euler": (((),), (1.0,)),
    "midpoint": (((), (1 / 2,)), (0.0, 1.0)),
    "rk4": (((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
}
Velocity = str | Callable[[Tensor], Tensor] | None


def _torchdiffeq() -> Any:
    return require("torchdiffeq")


def solvers() -> tuple[str, ...]:
    """The names of torchdiffeq's solvers."""
    _torchdiffeq()
    from torchdiffeq._impl.odeint import SOLVERS

    return tuple(SOLVERS)


class _OdeBlock(nn.Module):
    """What the blocks share: the solver and how it is differentiated."""

    def __init__(
        self, f: nn.Module, *, horizon: float = 1.0, solver: str = "dopri5", rtol: float = 1e-6, atol: float = 1e-8,
        steps: int | None = None, gradient: str = "adjoint", options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not isinstance(f, nn.Module):
            raise TypeError(f"f must be an nn.Module, so that its parameters can be found; got {type(f).__name__}.")
        self.f = f
        self.horizon = positive("horizon", horizon)
        self.solver = choice("solver", solver, solvers())
        self.gradient = choice("gradient", gradient, ("adjoint", "direct"))
        self.rtol = positive("rtol", rtol)
        self.atol = positive("atol", atol)
        self.options = dict(options or {})
        self.steps = steps
        if steps is not None:
            if solver not in FIXED_STEP:
                raise ValueError(
                    f"steps is for solvers of a fixed step ({', '.join(FIXED_STEP)}); {solver!r} finds its own: set rtol and atol."
                )
            self.options["step_size"] = self.horizon / whole("steps", steps)

    def derivative(self, t: Tensor, state: Any) -> Any:
        raise NotImplementedError

    def solve(self, state: Any, times: Tensor) -> Any:
        """The state at each of the times, the first of which is where it is now."""
        torchdiffeq = _torchdiffeq()
        settings: dict[str, Any] = {"method": self.solver, "rtol": self.rtol, "atol": self.atol}
        if self.options:
            settings["options"] = dict(self.options)
        if self.gradient == "direct" or not torch.is_grad_enabled():
            return torchdiffeq.odeint(self.derivative, state, times, **settings)
        parameters = tuple(self.f.parameters())
        return torchdiffeq.odeint_adjoint(self.derivative, state, times, adjoint_params=parameters, **settings)

    def flow(self, state: tuple[Tensor, ...], back: bool = False) -> tuple[Tensor, ...]:
        """The state at T from that at 0, or the other way round."""
        if self._explicit():
            return self._stepped(state, back)
        times = torch.tensor([0.0, self.horizon], dtype=state[0].dtype, device=state[0].device)
        solved = self.solve(state if len(state) > 1 else state[0], times.flip(0) if back else times)
        return tuple(part[-1] for part in (solved if len(state) > 1 else (solved,)))

    def _explicit(self) -> bool:
        own = self.gradient == "direct" and self.solver in EXPLICIT and type(self).solve is _OdeBlock.solve
        return own and self.steps is not None and self.options == {"step_size": self.horizon / self.steps}

    def _stepped(self, state: tuple[Tensor, ...], back: bool) -> tuple[Tensor, ...]:
        """The steps of an explicit solver. Nothing waits for the device, so a CUDA graph can capture them."""
        steps, (stages, last) = self.steps or 1, EXPLICIT[self.solver]
        h = (-1 if back else 1) * self.horizon / steps
        for step in range(steps):
            start = (self.horizon if back else 0.0) + step * h
            slopes: list[tuple[Tensor, ...]] = []
            for weights in stages:
                at = _moved(state, slopes, weights, h)
                t = torch.full((), start + sum(weights) * h, dtype=at[0].dtype, device=at[0].device)
                slope = self.derivative(t, at if len(at) > 1 else at[0])
                slopes.append(slope if len(at) > 1 else (slope,))
            state = _moved(state, slopes, last, h)
        return state

    def extra_repr(self) -> str:
        steps = "" if self.steps is None else f", steps={self.steps}"
        return f"horizon={self.horizon:g}, solver={self.solver!r}{steps}, gradient={self.gradient!r}"


def _moved(
    state: tuple[Tensor, ...], slopes: list[tuple[Tensor, ...]], weights: tuple[float, ...], h: float
) -> tuple[Tensor, ...]:
    for weight, slope in zip(weights, slopes, strict=True):
        if weight:
            state = tuple(torch.add(part, k, alpha=weight * h) for part, k in zip(state, slope, strict=True))
    return state


class NeuralODE(_OdeBlock):
    """ẋ = f(x), x(0) ↦ x(T).

    Args:
        f: a module of x.
        horizon: T.
        solver: any of `solvers()`.
        rtol, atol: tolerances of the adaptive solvers.
        steps: how many steps a solver of fixed step takes from 0 to T.
        gradient: "adjoint": by the adjoint ODE, in constant memory; "direct": through the solver.
        options: more for torchdiffeq.

    >>> block = NeuralODE(nn.Linear(3, 3), gradient="adjoint")
    >>> block(torch.ones(2, 3)).sum().backward()
    """

    def forward(self, x: Tensor) -> Tensor:
        check_finite(x)
        return self.flow((x,))[0]

    def inverse(self, y: Tensor) -> Tensor:
        """x(0) from x(T), to the solver's tolerance."""
        check_finite(y, "the output to invert")
        return self.flow((y,), back=True)[0]

    def derivative(self, t: Tensor, state: Tensor) -> Tensor:
        return self.f(state)


class AugmentedODE(NeuralODE):
    """A Neural ODE on x with `extra` more channels, zero at first [dupont2019]. The output has them, too.

    Args:
        f: a module of the augmented x.
        extra: how many channels (size along dim 1) are added.
        settings: as in `NeuralODE`.
    """

    def __init__(self, f: nn.Module, extra: int, **settings: Any) -> None:
        super().__init__(f, **settings)
        self.extra = whole("extra", extra)

    def forward(self, x: Tensor) -> Tensor:
        check_finite(x)
        if x.dim() < 2:
            raise ValueError(f"x must have channels along dim 1 to be augmented; got shape {tuple(x.shape)}.")
        return super().forward(torch.cat([x, x.new_zeros(x.shape[0], self.extra, *x.shape[2:])], 1))

    def inverse(self, y: Tensor) -> Tensor:
        """x from the augmented output."""
        x = super().inverse(y)
        return x[:, : x.shape[1] - self.extra]


class SecondOrderODE(_OdeBlock):
    """ε ẍ + ẋ = f(x), x(0) = x₀, ẋ(0) = v₀; x₀ ↦ x(T).

    Args:
        f: a module of x.
        eps: ε > 0; 1/(1 − γ) of the Momentum ResNet that it is the limit of.
        velocity: v₀: None for 0, "first" for f(x₀), or a module (or function) of x₀.
        settings: as in `NeuralODE`.
    """

    def __init__(self, f: nn.Module, eps: float = 1.0, *, velocity: Velocity = None, **settings: Any) -> None:
        super().__init__(f, **settings)
        self.eps = positive("eps", eps, why="ε = 0 is the first-order equation: use NeuralODE.")
        _velocity(velocity, f)  # raises if it is none of these
        self.velocity = velocity

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)[0]

    def encode(self, x: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x(T) and v(T) from x(0) and v(0). Pass the v(T) of the block before as v; without it, `velocity` gives v(0)."""
        check_finite(x)
        if v is not None:
            check_finite(v, "v")
            wanted, given = ((tuple(t.shape), t.dtype, t.device.type) for t in (x, v))
            if wanted != given:
                raise ValueError(f"v must have shape, dtype and device of x, {wanted}; got {given}.")
        x1, v1 = self.flow((x, self._start(x) if v is None else v))
        return x1, v1

    def inverse(self, state: tuple[Tensor, Tensor]) -> Tensor:
        """x₀ from x(T) and v(T), to the solver's tolerance."""
        for part, what in zip(state, ("x(T)", "v(T)"), strict=True):
            check_finite(part, what)
        return self.flow(tuple(state), back=True)[0]

    def derivative(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, v = state
        return v, (self.f(x) - v) / self.eps

    def _start(self, x: Tensor) -> Tensor:
        v0 = _velocity(self.velocity, self.f)
        return torch.zeros_like(x) if v0 is None else v0(x)

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, {super().extra_repr()}"


def discretised(
    f: nn.Module, eps: float, steps: int, horizon: float = 1.0, *, velocity: Velocity = None, **options: Any
) -> MomentumNet:
    """The Momentum ResNet with `steps` layers that discretises ε ẍ + ẋ = f(x) on [0, T]; all layers share f.

        w ← (1 − h/ε)·w + (h/ε)·h·f(x)        x ← x + w,        w = h·ẋ,  h = T/N

    So γ = 1 − h/ε and the blocks are h·f [sander2021, Sec. 3.4]; at h = 1 this is the paper's ε = 1/(1 − γ).

    Raises:
        ValueError: if the step is so large that γ is not above 0.

    >>> discretised(nn.Linear(3, 3), eps=10.0, steps=4, horizon=4.0).gamma
    Fraction(9, 10)
    """
    eps, horizon = positive("eps", eps, why="ε = 0 is a ResNet."), positive("horizon", horizon)
    T, e = (Fraction(number).limit_denominator(10**6) for number in (horizon, eps))  # 0.1 means 1/10
    gamma = 1 - T / (whole("steps", steps) * e) if e else Fraction(0)
    if gamma <= 0:
        raise ValueError(
            f"{steps} steps for eps={eps:g} over {horizon:g} give gamma = 1 − T/(N·eps) = {float(gamma):.3g}; it must be above 0: "
            f"take more than {math.floor(horizon / eps)} steps."
        )
    h, v0 = horizon / steps, _velocity(velocity, f)
    return MomentumNet([Kick(f, h)] * steps, float(gamma), velocity=None if v0 is None else Kick(v0, h), **options)


def _velocity(velocity: Velocity, f: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function of x₀ that gives v₀, or None for v₀ = 0."""
    if velocity == "first":
        return f
    if velocity is not None and not callable(velocity):
        raise ValueError(f"velocity must be None, 'first', or a module or function of x; got {velocity!r}.")
    return velocity
