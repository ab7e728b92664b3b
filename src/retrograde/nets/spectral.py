"""Layers whose operator norm is bounded: W is used as W · min(1, c / σ), σ the largest singular value of the layer.

σ comes from power iteration with the layer itself and its adjoint, u ← A v / ‖A v‖, v ← Aᵀu / ‖Aᵀu‖. For a convolution A is
the convolution on images of the size it meets, padding and stride included; the norm of its reshaped kernel, which is
often used in its place, is neither a bound nor close.

In training a few iterations per forward pass follow the weights, as in [miyato2018, behrmann2019]; in evaluation the iteration
runs until σ settles, and again only when the weights have changed. Power iteration comes from below, so a proof needs
something else: `certified_norm` bounds the norm from above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

_SETTLED, _MOST = 1e-10, 1000  # power iteration in evaluation ends at this relative change of σ, or after so many
_DENSE = 1024  # up to so many values per sample a convolution is written out as a matrix to find its norm


class _Bounded(nn.Module):
    """What the bounded layers share. `weight`, `bias` and so the state_dict are those of the plain layer."""

    weight: Tensor
    bias: Any
    u: Tensor | None  # the left singular vector, as far as power iteration has come

    def _bound(self, coefficient: float, iterations: int = 5) -> None:
        self.coefficient, self.iterations = coefficient, iterations
        self.shape: torch.Size | None = None  # of one input sample
        self.register_buffer("u", None, persistent=False)
        self._seen: Any = None

    def _apply_to(self, weight: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def _adjoint(self, weight: Tensor, u: Tensor) -> Tensor:
        raise NotImplementedError

    def _frozen(self, weight: Tensor) -> nn.Module:
        raise NotImplementedError

    def follow(self, x: Tensor) -> None:
        """Bring u up to date with the weights, for inputs like x."""
        weight, shape = self.weight.detach(), x.shape[1:] if isinstance(self, nn.Conv2d) else x.shape[-1:]
        with torch.no_grad():
            if self.u is None or self.shape != shape or self.u.dtype != weight.dtype or self.u.device != weight.device:
                self.shape, self._seen = shape, None
                self.u = _unit(self._apply_to(weight, _start(shape, weight)))
            seen = (weight.data_ptr(), weight._version)
            if not self.training and seen == self._seen:
                return
            settled = max(_SETTLED, 2 * torch.finfo(weight.dtype).eps)
            sigma = torch.zeros((), dtype=weight.dtype, device=weight.device)
            for _ in range(self.iterations if self.training else _MOST):
                before, image = sigma, self._apply_to(weight, _unit(self._adjoint(weight, self.u)))
                sigma, self.u = image.norm(), _unit(image)
                if not self.training and abs(sigma - before) <= settled * sigma:
                    break
            self._seen = None if self.training else seen

    def sigma(self) -> Tensor:
        """The largest singular value as the current u has it; a function of the weights."""
        assert self.u is not None
        v = _unit(self._adjoint(self.weight.detach(), self.u.detach()))
        image = self._apply_to(self.weight, v)
        return (_unit(image.detach()) * image).sum()

    def bounded(self) -> Tensor:
        """W · min(1, c / σ)."""
        sigma = self.sigma()
        return self.weight * torch.clamp(self.coefficient / sigma.clamp_min(1e-30), max=1.0)

    def frozen(self) -> nn.Module:
        """The plain float64 layer with the bounded weight of the last forward pass."""
        with torch.no_grad():
            return self._frozen(self.bounded().double()).double()


class BoundedLinear(_Bounded, nn.Linear):
    """A linear layer with norm at most c."""

    def __init__(self, plain: nn.Linear, coefficient: float) -> None:
        nn.Linear.__init__(self, plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        self._parameters.update(plain._parameters)
        self._bound(coefficient)

    def forward(self, x: Tensor) -> Tensor:
        self.follow(x)
        return F.linear(x, self.bounded(), self.bias)

    def _apply_to(self, weight: Tensor, v: Tensor) -> Tensor:
        return F.linear(v, weight)

    def _adjoint(self, weight: Tensor, u: Tensor) -> Tensor:
        return F.linear(u, weight.t())

    def _frozen(self, weight: Tensor) -> nn.Module:
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device=weight.device)
        return _filled(layer, weight, self.bias)


class BoundedConv2d(_Bounded, nn.Conv2d):
    """A convolution (zero padding, no groups) with norm at most c on images of the size it meets."""

    def __init__(self, plain: nn.Conv2d, coefficient: float) -> None:
        if plain.groups != 1 or plain.padding_mode != "zeros" or isinstance(plain.padding, str):
            raise ValueError(
                f"{plain} cannot be bounded: only convolutions with groups=1 and numeric zero padding can. Write padding "
                "as a number (kernel // 2 for 'same')."
            )
        nn.Conv2d.__init__(self, **_settings(plain), bias=plain.bias is not None, device="meta")
        self._parameters.update(plain._parameters)
        self._bound(coefficient)

    def forward(self, x: Tensor) -> Tensor:
        self.follow(x)
        return self._conv_forward(x, self.bounded(), self.bias)

    def _apply_to(self, weight: Tensor, v: Tensor) -> Tensor:
        return F.conv2d(v[None], weight, None, self.stride, self.padding, self.dilation)[0]

    def _adjoint(self, weight: Tensor, u: Tensor) -> Tensor:
        assert self.shape is not None
        settings = (self.stride, self.padding, self.dilation)
        return conv2d_input((1, *self.shape), weight, u[None], *settings)[0]

    def _frozen(self, weight: Tensor) -> nn.Module:
        layer = nn.Conv2d(**_settings(self), bias=self.bias is not None, device=weight.device)
        return _filled(layer, weight, self.bias)


@torch.no_grad()
def certified_norm(layer: Any, shape: torch.Size) -> float:
    """An upper bound on the operator norm of a plain layer for samples of this shape, to rounding.

    Linear, and convolutions of small images: the largest singular value of the matrix. Others: `symbol_norm`.
    """
    weight = layer.weight.double()
    if isinstance(layer, nn.Linear):
        return float(torch.linalg.matrix_norm(weight, 2))
    if shape.numel() > _DENSE:
        return symbol_norm(layer, shape)
    units = torch.eye(shape.numel(), dtype=weight.dtype, device=weight.device).view(-1, *shape)
    columns = F.conv2d(units, weight, None, layer.stride, layer.padding, layer.dilation).flatten(1)
    return float(torch.linalg.eigvalsh(columns @ columns.t())[-1].clamp_min(0).sqrt())


@torch.no_grad()
def symbol_norm(layer: nn.Conv2d, shape: torch.Size) -> float:
    """An upper bound on the norm of a convolution, a few percent high on small images and tight on large ones.

    The convolution is a part of the periodic one on the image enlarged by the kernel's reach, and the norm of that is the
    largest singular value of the kernel's Fourier symbol over that grid.
    """
    weight = layer.weight.double()
    (a, b), (p, q) = layer.dilation, layer.kernel_size
    grid = [shape[-2] + a * (p - 1), shape[-1] + b * (q - 1)]
    spread = weight.new_zeros(*weight.shape[:2], a * (p - 1) + 1, b * (q - 1) + 1)
    spread[..., ::a, ::b] = weight
    symbol = torch.fft.fft2(spread, s=grid).permute(2, 3, 0, 1)
    symbol = symbol[: grid[0] // 2 + 1]  # the others are complex conjugates of these
    return float(torch.linalg.matrix_norm(symbol, 2).max())


def _settings(plain: nn.Conv2d) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    return {name: getattr(plain, name) for name in names}


def _unit(x: Tensor) -> Tensor:
    return x / x.norm().clamp_min(1e-30)


def _start(shape: torch.Size, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # the user's random numbers are left alone
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


def _filled(layer: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer
