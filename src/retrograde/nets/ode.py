"""ODE blocks: a network's depth as time [chen2018; dupont2019; sander2021, Sec. 2 and eq. 6].

    NeuralODE         ẋ = f(x)                        x(0) ↦ x(T)
    AugmentedODE      the same on (x, 0): more dimensions, so that trajectories may pass each other
    SecondOrderODE    ε ẍ + ẋ = f(x)                  as ẋ = v, v̇ = (f(x) − v) / ε; the limit of Momentum ResNets

The solvers are torchdiffeq's, any of them. Gradients come from the adjoint ODE, in memory that does not depend on the
number of steps, or directly from the solver's own operations; then the simplest solvers of a fixed step run here, for
torchdiffeq compares the times of every step on the device and waits for it. The inverse integrates from T back to 0: right to the
solver's tolerance (times the growth of the backward flow), never to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..extras import require
from .inputs import check_finite, choice, positive, whole

FIXED_STEP = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")
EXPLICIT = {  # the stages, each by the ones before it, and the step by all of them, as torchdiffeq has them
    "euler": (((),), (1.0,)),
    "midpoint": (((), (1 / 2,)), (0.0, 1.0)),
    "rk4": (((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), (1 / 8, 3 / 8, 3 / 8, 1 / 8)),
}


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
        self.f, self.horizon = f, positive("horizon", horizon)
        self.solver, self.gradient = (
            choice("solver", solver, solvers()),
            choice("gradient", gradient, ("adjoint", "direct")),
        )
        self.rtol, self.atol = positive("rtol", rtol), positive("atol", atol)
        self.options = dict(options or {})
        if steps is not None:
            if solver not in FIXED_STEP:
                raise ValueError(
                    f"steps is for solvers of a fixed step ({', '.join(FIXED_STEP)}); {solver!r} finds its own: set rtol and atol."
                )
            self.options["step_size"] = self.horizon / whole("steps", steps)
        self.steps = steps

    def derivative(self, t: Tensor, state: Any) -> Any:
        raise NotImplementedError

    def solve(self, state: Any, times: Tensor) -> Any:
        """The state at each of the times, the first of which is where it is now."""
        torchdiffeq = _torchdiffeq()
        settings: dict[str, Any] = {"method": self.solver, "rtol": self.rtol, "atol": self.atol}
        if self.options:
            settings["options"] = dict(self.options)
        if self.gradient == "adjoint" and torch.is_grad_enabled():
            return torchdiffeq.odeint_adjoint(
                self.derivative, state, times, adjoint_params=tuple(self.f.parameters()), **settings
            )
        return torchdiffeq.odeint(self.derivative, state, times, **settings)

    def flow(self, state: tuple[Tensor, ...], back: bool = False) -> tuple[Tensor, ...]:
        """The state at T from that at 0, or the other way round."""
        if self._explicit():
            return self._stepped(state, back)
        times = self._times(state[0])
        solved = self.solve(state if len(state) > 1 else state[0], times.flip(0) if back else times)
        return tuple(part[-1] for part in (solved if len(state) > 1 else (solved,)))

    def _explicit(self) -> bool:
        own = self.gradient == "direct" and self.solver in EXPLICIT and type(self).solve is _OdeBlock.solve
        return own and self.steps is not None and self.options == {"step_size": self.horizon / self.steps}

    def _stepped(self, state: tuple[Tensor, ...], back: bool) -> tuple[Tensor, ...]:
        """The steps of an explicit solver: nothing is asked of the device, so that a CUDA graph can be made of them."""
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

    def _times(self, like: Tensor) -> Tensor:
        return torch.tensor([0.0, self.horizon], dtype=like.dtype, device=like.device)

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
        """x(0) from x(T), as well as the solver finds it."""
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

    def __init__(
        self,
        f: nn.Module,
        eps: float = 1.0,
        *,
        velocity: str | Callable[[Tensor], Tensor] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(f, **settings)
        why = "ε = 0 is the first-order equation: use NeuralODE."
        self.eps = positive("eps", eps, why=why)
        if velocity is not None and velocity != "first" and not callable(velocity):
            raise ValueError(f"velocity must be None, 'first', or a module or function of x; got {velocity!r}.")
        self.velocity = velocity

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)[0]

    def encode(self, x: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x(T) and v(T), from x(0) and v(0): that of the block before, so that both go on; `velocity` if there is none."""
        check_finite(x)
        if v is not None:
            check_finite(v, "v")
            wanted, given = ((tuple(t.shape), t.dtype, t.device.type) for t in (x, v))
            if wanted != given:
                raise ValueError(f"v must have shape, dtype and device of x, {wanted}; got {given}.")
        x1, v1 = self.flow((x, self._start(x) if v is None else v))
        return x1, v1

    def inverse(self, state: tuple[Tensor, Tensor]) -> Tensor:
        """x₀ from x(T) and v(T), as well as the solver finds it."""
        for part, what in zip(state, ("x(T)", "v(T)"), strict=True):
            check_finite(part, what)
        return self.flow(tuple(state), back=True)[0]

    def derivative(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, v = state
        return v, (self.f(x) - v) / self.eps

    def _start(self, x: Tensor) -> Tensor:
        if self.velocity is None:
            return torch.zeros_like(x)
        return self.f(x) if self.velocity == "first" else self.velocity(x)  # type: ignore[operator]

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, {super().extra_repr()}"
