"""`IResNet`: residual blocks that contract, inverted by fixed-point iteration [behrmann2019].

    y = x + g(x),  Lip(g) ≤ c < 1          x_{k+1} = y − g(x_k),  x₀ = y

    ‖x_k − x‖ ≤ c^k / (1 − c) · ‖x₁ − x₀‖                 known before iterating: how many steps a tolerance needs
    ‖x_k − x‖ ≤ c / (1 − c) · ‖x_k − x_{k−1}‖             known while iterating: when to stop

Every layer of g is held to c^(1/layers) by its spectral norm (`spectral`), which is a constraint on training: plain gradient
steps on the weights themselves leave the set of invertible networks. The inverse is certified: it uses an upper bound of
Lip(g) proven from the weights in use, runs in float64, and reports the bound on its error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import check_finite, modules, positive
from .spectral import BoundedConv2d, BoundedLinear, certified_norm

_NONEXPANSIVE = (nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Hardtanh)


@dataclass(frozen=True)
class Certificate:
    """How one block was inverted: `error_bound` bounds ‖x − x_exact‖, relative to ‖x‖ or ‖y‖, of every sample."""

    block: int
    lipschitz: float  # a proven bound on Lip(g)
    iterations: int
    needed: int  # iterations that the first step promised would do
    error_bound: float


def needed(lipschitz: float, first_step: float, tolerance: float) -> int:
    """The smallest k with c^k / (1 − c) · first_step ≤ tolerance.

    >>> needed(0.9, first_step=1.0, tolerance=1e-6)
    153
    """
    if first_step == 0 or lipschitz == 0:
        return 1
    return max(1, math.ceil(math.log(tolerance * (1 - lipschitz) / first_step) / math.log(lipschitz)))


@torch.no_grad()
def invert(g: nn.Module, y: Tensor, lipschitz: float, tolerance: float, block: int = 0) -> tuple[Tensor, Certificate]:
    """x with x + g(x) = y, by fixed-point iteration, for a g with Lip(g) ≤ `lipschitz` < 1 in the norm of each sample."""
    x, iterations, promised, error = y, 0, 1, math.inf
    while error > tolerance:
        moved = y - g(x)
        step = _largest_ratio(moved - x, moved, y)
        x, iterations = moved, iterations + 1
        if iterations == 1:
            promised = needed(lipschitz, step, tolerance)
        error = lipschitz / (1 - lipschitz) * step
        if not math.isfinite(error) or iterations > promised + 10:
            raise ArithmeticError(
                f"block {block}: the fixed-point iteration stands at an error bound of {error:.1e} after {iterations} iterations, "
                f"when {promised} should have reached {tolerance:.1e}. The block does not contract as its bound of "
                f"{lipschitz:.3g} says, or the tolerance is below what float64 can reach (about 1e-13)."
            )
    return x, Certificate(block, lipschitz, iterations, promised, error)


def _largest_ratio(step: Tensor, x: Tensor, y: Tensor) -> float:
    """The largest ‖step‖ / max(‖x‖, ‖y‖) of any sample."""
    norms = [t.flatten(1).norm(dim=1) for t in (step, x, y)]
    ratios = norms[0] / torch.maximum(norms[1], norms[2]).clamp_min(1e-300)
    return float(ratios.max()) if ratios.numel() else 0.0


class IResNet(nn.Module):
    """A stack of contractive residual blocks x + g(x).

    Args:
        blocks: `nn.Sequential`s g of Linear or Conv2d layers and activations that do not expand (ReLU, ELU, Tanh, …). They
            are not changed, but their parameters are shared, under the same names: a plain residual network's state_dict fits.
        coefficient: c < 1, the bound on Lip(g) of every block.

    Shape:
        x: (N, …), what the blocks take and return.

    >>> net = IResNet([nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 4)) for _ in range(3)], coefficient=0.9).eval()
    >>> x = torch.randn(5, 4)
    >>> back, certificates = net.inverse(net(x))
    >>> bool((back - x).abs().max() < 1e-5), max(c.iterations for c in certificates) < 200
    (True, True)
    """

    def __init__(self, blocks: Iterable[nn.Module], coefficient: float = 0.9) -> None:
        super().__init__()
        why = "A residual block is sure to be invertible only if its branch contracts; 0.9 is a common choice."
        self.coefficient = positive("the Lipschitz coefficient", coefficient, below=1, why=why)
        self.blocks = nn.ModuleList(_bounded(g, self.coefficient, k) for k, g in enumerate(modules(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        check_finite(x)
        for g in self.blocks:
            x = x + g(x)
        return x

    @torch.no_grad()
    def inverse(self, y: Tensor, tolerance: float = 1e-10) -> tuple[Tensor, tuple[Certificate, ...]]:
        """x with net(x) = y, and how each block was inverted, the last block first.

        Args:
            y: the output.
            tolerance: relative error of each block's inverse, in the norm of the sample.

        Raises:
            ValueError: if a block cannot be proven to contract.
        """
        check_finite(y, "the output to invert")
        positive("tolerance", tolerance, below=1)
        x, certificates = y.double(), []
        for k in reversed(range(len(self.blocks))):
            g, lipschitz = self.frozen(k, y)
            if lipschitz >= 1:
                raise ValueError(
                    f"block {k} is bounded by {lipschitz:.4g} only, which proves no inverse: it must be below 1. Pass a lower "
                    f"coefficient than {self.coefficient:g}; in training, call .eval() first so that its norms settle."
                )
            x, certificate = invert(g, x, lipschitz, tolerance, k)
            certificates.append(certificate)
        return x.to(y.dtype), tuple(certificates)

    @torch.no_grad()
    def frozen(self, k: int, like: Tensor) -> tuple[nn.Module, float]:
        """Block k as a plain float64 module with its weights as bounded now, and a proven bound on its Lipschitz constant.

        Args:
            like: a tensor of the shape that the network takes; convolutions are bounded for its size.
        """
        layers: Any = self.blocks[k]
        bounded = [m for m in layers if isinstance(m, BoundedLinear | BoundedConv2d)]
        if not self.training or any(m.u is None for m in bounded):
            layers(like)
        plain = [m.frozen() if m in bounded else m for m in layers]
        norms = (certified_norm(p, m.shape) for p, m in zip(plain, layers, strict=True) if m in bounded)
        return nn.Sequential(*plain), math.prod(norms)

    def extra_repr(self) -> str:
        return f"depth={len(self.blocks)}, coefficient={self.coefficient:g}"


def _bounded(g: nn.Module, coefficient: float, k: int) -> nn.Sequential:
    layers = list(g) if isinstance(g, nn.Sequential) else [g]
    count = sum(isinstance(m, nn.Linear | nn.Conv2d) for m in layers)
    held: list[nn.Module] = []
    for m in layers:
        if isinstance(m, nn.Linear | nn.Conv2d):
            bound = coefficient ** (1 / count)
            held.append(BoundedLinear(m, bound) if isinstance(m, nn.Linear) else BoundedConv2d(m, bound))
        elif isinstance(m, _NONEXPANSIVE) and getattr(m, "negative_slope", 0) <= 1 and getattr(m, "alpha", 0) <= 1:
            held.append(m)
        else:
            raise TypeError(
                f"block {k} holds a {type(m).__name__}, whose Lipschitz constant is not bounded. An i-ResNet's block is a "
                "Sequential of Linear, Conv2d and "
                f"{', '.join(c.__name__ for c in _NONEXPANSIVE)} (no normalisation, no dropout)."
            )
    return nn.Sequential(*held)
