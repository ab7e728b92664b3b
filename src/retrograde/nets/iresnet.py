"""`IResNet`: residual blocks that contract, inverted by fixed-point iteration [behrmann2019].

    y = x + g(x),  Lip(g) ≤ c < 1          x_{k+1} = y − g(x_k),  x₀ = y

    ‖x_k − x‖ ≤ c^k / (1 − c) · ‖x₁ − x₀‖                 known before iterating: how many steps a tolerance needs
    ‖x_k − x‖ ≤ c / (1 − c) · ‖x_k − x_{k−1}‖             known while iterating: when to stop

Every layer of g uses its weight as W · min(1, c^(1/layers) / σ), σ the largest singular value of the layer. This constrains
training: plain gradient steps on the weights themselves leave the set of invertible networks.

σ comes from power iteration with the layer A and its adjoint, u ← A v / ‖A v‖, v ← Aᵀu / ‖Aᵀu‖. For a convolution, A is
the convolution on images of the size it meets, padding and stride included. (The norm of its reshaped kernel is often used
instead; it is neither a bound nor close.) In training, a few iterations per forward pass follow the weights, as in
[miyato2018, behrmann2019]. In evaluation the iteration runs until σ converges, and again only after the weights have changed.

Power iteration bounds σ from below and proves nothing. So the inverse uses `certified_norm`, an upper bound of Lip(g) proven
from the weights in use. It runs in float64 and reports the bound on its error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from .checks import check_finite, modules, positive

_NONEXPANSIVE = (nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity, nn.Hardtanh)
_CONVERGED, _MOST = 1e-10, 1000  # power iteration in evaluation ends at this relative change of σ, or after so many
_DENSE = 1024  # up to so many values per sample a convolution is written out as a matrix to find its norm


@dataclass(frozen=True)
class Certificate:
    """How one block was inverted: `error_bound` bounds ‖x − x_exact‖, relative to ‖x‖ or ‖y‖, of every sample."""

    block: int
    lipschitz: float  # a proven bound on Lip(g)
    iterations: int
    needed: int  # iterations that the first step promised to suffice
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
def invert(
    g: Callable[[Tensor], Tensor], y: Tensor, lipschitz: float, tolerance: float, block: int = 0
) -> tuple[Tensor, Certificate]:
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
                f"block {block}: after {iterations} iterations the fixed-point iteration has an error bound of {error:.1e}, "
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
                    f"coefficient than {self.coefficient:g}; in training, call .eval() first so that its norms converge."
                )
            x, certificate = invert(g, x, lipschitz, tolerance, k)
            certificates.append(certificate)
        return x.to(y.dtype), tuple(certificates)

    @torch.no_grad()
    def frozen(self, k: int, like: Tensor) -> tuple[Callable[[Tensor], Tensor], float]:
        """Block k in float64 with its weights as bounded now, and a proven bound on its Lipschitz constant.

        Args:
            like: a tensor of the shape that the network takes; convolutions are bounded for its size.
        """
        layers: Any = self.blocks[k]
        bounded = [m for m in layers if isinstance(m, _Bounded)]
        if not self.training or any(m.u is None for m in bounded):
            layers(like)
        weights = {m: m.bounded().double() for m in bounded}
        biases = {m: None if m.bias is None else m.bias.double() for m in bounded}

        def g(x: Tensor) -> Tensor:
            for m in layers:
                x = m.run(x, weights[m], biases[m]) if m in weights else m(x)
            return x

        return g, math.prod(certified_norm(m, m.shape, weight) for m, weight in weights.items())

    def extra_repr(self) -> str:
        return f"depth={len(self.blocks)}, coefficient={self.coefficient:g}"


def _bounded(g: nn.Module, coefficient: float, k: int) -> nn.Sequential:
    layers = list(g) if isinstance(g, nn.Sequential) else [g]
    bounds = {nn.Linear: BoundedLinear, nn.Conv2d: BoundedConv2d}
    kinds = [next((bound for kind, bound in bounds.items() if isinstance(m, kind)), None) for m in layers]
    each = coefficient ** (1 / max(1, sum(kind is not None for kind in kinds)))
    for m, kind in zip(layers, kinds, strict=True):
        contracts = (
            isinstance(m, _NONEXPANSIVE) and getattr(m, "negative_slope", 0) <= 1 and getattr(m, "alpha", 0) <= 1
        )
        if kind is None and not contracts:
            raise TypeError(
                f"block {k} holds a {type(m).__name__}, whose Lipschitz constant is not bounded. An i-ResNet's block is a "
                f"Sequential of Linear, Conv2d and {', '.join(c.__name__ for c in _NONEXPANSIVE)} (no normalisation, no dropout)."
            )
    return nn.Sequential(*(m if kind is None else kind(m, each) for m, kind in zip(layers, kinds, strict=True)))


class _Bounded(nn.Module):
    """A layer whose operator has a norm of at most c. `weight`, `bias` and so the state_dict are those of the plain layer."""

    weight: Tensor
    bias: Any
    u: Tensor | None  # the left singular vector, as far as power iteration has come
    iterations = 5  # per forward pass in training
    dimensions = 1  # of a sample

    def _take(self, plain: nn.Module, coefficient: float) -> None:
        self._parameters.update(plain._parameters)
        self.coefficient = coefficient
        self.shape = torch.Size()  # of one input sample
        self.register_buffer("u", None, persistent=False)
        self._seen: Any = None  # the weights for which σ has converged

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer, or without a bias its operator, with another weight."""
        raise NotImplementedError

    def adjoint(self, u: Tensor, weight: Tensor) -> Tensor:
        """The adjoint of its operator."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.follow(x)
        return self.run(x, self.bounded(), self.bias)

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        """Bring u up to date with the weights, for inputs like x."""
        weight, shape = self.weight.detach(), x.shape[-self.dimensions :]
        if self.u is None or self.shape != shape or self.u.dtype != weight.dtype or self.u.device != weight.device:
            self.shape, self._seen = shape, None
            generator = torch.Generator().manual_seed(0)  # not the user's
            start = torch.randn(shape, generator=generator, dtype=torch.float64).to(weight)
            self.u = _unit(self.run(start, weight))
        seen = (weight.data_ptr(), weight._version)
        if not self.training and seen == self._seen:
            return
        converged = max(_CONVERGED, 2 * torch.finfo(weight.dtype).eps)
        sigma = torch.zeros((), dtype=weight.dtype, device=weight.device)
        for _ in range(self.iterations if self.training else _MOST):
            before, image = sigma, self.run(_unit(self.adjoint(self.u, weight)), weight)
            sigma, self.u = image.norm(), _unit(image)
            if not self.training and abs(sigma - before) <= converged * sigma:
                break
        self._seen = None if self.training else seen

    def sigma(self) -> Tensor:
        """The largest singular value as the current u has it; a function of the weights."""
        assert self.u is not None
        image = self.run(_unit(self.adjoint(self.u.detach(), self.weight.detach())), self.weight)
        return (_unit(image.detach()) * image).sum()

    def bounded(self) -> Tensor:
        """W · min(1, c / σ)."""
        return self.weight * torch.clamp(self.coefficient / self.sigma().clamp_min(1e-30), max=1.0)


class BoundedLinear(_Bounded, nn.Linear):
    """A linear layer with norm at most c."""

    def __init__(self, plain: nn.Linear, coefficient: float) -> None:
        nn.Linear.__init__(self, plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self._take(plain, coefficient)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def adjoint(self, u: Tensor, weight: Tensor) -> Tensor:
        return F.linear(u, weight.t())


class BoundedConv2d(_Bounded, nn.Conv2d):
    """A convolution (zero padding, no groups) with norm at most c on images of the size it meets."""

    dimensions = 3

    def __init__(self, plain: nn.Conv2d, coefficient: float) -> None:
        if plain.groups != 1 or plain.padding_mode != "zeros" or isinstance(plain.padding, str):
            raise ValueError(
                f"{plain} cannot be bounded: only convolutions with groups=1 and numeric zero padding can. Write padding "
                "as a number (kernel // 2 for 'same')."
            )
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
        nn.Conv2d.__init__(
            self, **{name: getattr(plain, name) for name in names}, bias=plain.bias is not None, device="meta"
        )
        self._take(plain, coefficient)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._conv_forward(x, weight, bias)

    def adjoint(self, u: Tensor, weight: Tensor) -> Tensor:
        return conv2d_input((1, *self.shape), weight, u[None], self.stride, self.padding, self.dilation)[0]


def _unit(x: Tensor) -> Tensor:
    return x / x.norm().clamp_min(1e-30)


@torch.no_grad()
def certified_norm(layer: Any, shape: torch.Size, weight: Tensor) -> float:
    """An upper bound on the operator norm of a layer with this weight for samples of this shape, to rounding.

    Linear, and convolutions of small images: the largest singular value of the matrix. Others: `symbol_norm`.
    """
    if isinstance(layer, nn.Linear):
        return float(torch.linalg.matrix_norm(weight, 2))
    if shape.numel() > _DENSE:
        return symbol_norm(layer, shape, weight)
    units = torch.eye(shape.numel(), dtype=weight.dtype, device=weight.device).view(-1, *shape)
    columns = F.conv2d(units, weight, None, layer.stride, layer.padding, layer.dilation).flatten(1)
    return float(torch.linalg.eigvalsh(columns @ columns.t())[-1].clamp_min(0).sqrt())


@torch.no_grad()
def symbol_norm(layer: nn.Conv2d, shape: torch.Size, weight: Tensor) -> float:
    """An upper bound on the norm of a convolution, a few percent high on small images and tight on large ones.

    The convolution is a part of the periodic one on the image enlarged by the kernel's reach, and the norm of that is the
    largest singular value of the kernel's Fourier symbol over that grid.
    """
    (a, b), (p, q) = layer.dilation, layer.kernel_size
    grid = [shape[-2] + a * (p - 1), shape[-1] + b * (q - 1)]
    spread = weight.new_zeros(*weight.shape[:2], a * (p - 1) + 1, b * (q - 1) + 1)
    spread[..., ::a, ::b] = weight
    symbol = torch.fft.fft2(spread, s=grid).permute(2, 3, 0, 1)
    symbol = symbol[: grid[0] // 2 + 1]  # the others are complex conjugates of these
    return float(torch.linalg.matrix_norm(symbol, 2).max())
