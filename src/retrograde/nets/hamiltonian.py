"""`HamiltonianNet`: the limit γ → 1 of a momentum network, with f rescaled by 1/(1 − γ) [sander2021, Sec. 3.3].

    v ← v + h·f(x)      x ← x + h·v                        symplectic Euler (Verlet with v between the steps)
    x ← x − h·v         v ← v − h·f(x)

It runs as a `MomentumNet` with γ = 1 on w = h·v: w ← w + h²·f(x), x ← x + w. Without a multiplication it needs no
information buffer, and the state takes 8 bytes per element at any depth. With

    f(x) = −Kᵀ tanh(Kx + b) = −∇U(x),      U(x) = Σ log cosh(Kx + b)        [haber2017, chang2018]

the network integrates ẋ = v, v̇ = −∇U(x), and nearly conserves the energy |v|²/2 + U(x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import modules, positive
from .momentum import MomentumNet, State


class Kick(nn.Module):
    """factor · f(x)."""

    def __init__(self, f: Any, factor: float) -> None:
        super().__init__()
        self.f, self.factor = f, factor

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.f(x, *args, **kwargs) * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor:g}"


class HamiltonianBlock(nn.Module):
    """f(x) = −Kᵀ tanh(Kx + b) = −∇U(x). K is a matrix, or a convolution if `kernel` is given.

    Args:
        width: features, or channels, of x.
        hidden: rows, or output channels, of K.
        kernel: the (odd) side of the convolution's kernel.
    """

    def __init__(self, width: int, hidden: int | None = None, kernel: int | None = None) -> None:
        super().__init__()
        if kernel is not None and kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that x keeps its size; got {kernel}.")
        shape = (hidden or width, width) + (() if kernel is None else (kernel, kernel))
        bound = 1 / math.sqrt(math.prod(shape[1:]))
        self.kernel = kernel
        self.K = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.empty(shape[0]).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self._inner(x))
        if self.kernel is None:
            return -F.linear(z, self.K.t())
        return -F.conv_transpose2d(z, self.K, padding=self.kernel // 2)

    def potential(self, x: Tensor) -> Tensor:
        """U(x), one value per sample."""
        z = self._inner(x)
        return (F.softplus(2 * z) - z - math.log(2)).flatten(1).sum(1)  # log cosh, without overflow

    def _inner(self, x: Tensor) -> Tensor:
        """Kx + b."""
        if self.kernel is None:
            return F.linear(x, self.K, self.b)
        return F.conv2d(x, self.K, self.b, padding=self.kernel // 2)


class HamiltonianNet(MomentumNet):
    """A stack of forces f as a symplectic integrator.

    Args:
        blocks: modules that compute f(x). `HamiltonianBlock` is −∇U; any other module that keeps the shape of x works, too.
        step: h, the size of a step.
        velocity: v₀: None for 0, "first" for f(x₀), or a module (or function) of x₀.
        options: `memory`, `fixed_point`, `verify`, `overflow`, as in `MomentumNet`.

    The parameters of block k are those of `blocks[k].f`.

    >>> net = HamiltonianNet([HamiltonianBlock(4) for _ in range(8)], step=0.1, memory="reverse")
    >>> net(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, blocks: Iterable[nn.Module], step: float = 1.0, *,
        velocity: str | Callable[[Tensor], Tensor] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.step = h = positive("step", step)
        given = modules(blocks)
        if velocity == "first":
            velocity = given[0]
        if callable(velocity):
            velocity = Kick(velocity, h)
        super().__init__([Kick(f, h * h) for f in given], gamma=1, velocity=velocity, **options)

    def energy(self, state: State, k: int = -1) -> Tensor:
        """|v|²/2 + U(x) of an encoded state, one value per sample, with the potential of block k."""
        f: Any = self.blocks[k].f
        if not hasattr(f, "potential"):
            raise TypeError(f"block {k} is a {type(f).__name__}, which has no potential; HamiltonianBlock has one.")
        return (state.v / self.step).flatten(1).square().sum(1) / 2 + f.potential(state.x)

    def extra_repr(self) -> str:
        return f"step={self.step:g}, {super().extra_repr()}"
