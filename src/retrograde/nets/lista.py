"""Learning to optimise: ISTA for the Lasso, and networks whose layers learn to do better [sander2021, Sec. 5.3].

    min over x of  L_y(x) = ‖y − Dx‖²/2 + λ‖x‖₁

    ISTA       x ← ST(x − η Dᵀ(Dx − y), ηλ)              ST(z, t) = sign(z) · max(|z| − t, 0)
    LISTA      x ← g(x, y) = ST(W¹x + W²y, ηλ)           learned W¹, W², from ISTA's: W¹ = I − ηDᵀD, W² = ηDᵀ

A layer of LISTA is a residual block, f = g − x, so a Momentum ResNet takes the very same parameters:

    resnet     x ← x + f(x, y)                           LISTA itself
    momentum   v ← γv + (1−γ)f(x, y)      x ← x + v
    revnet     v ← v + f(x, y)            x ← x + f'(v, y)     x duplicated at the start, twice the parameters

All start from x₀ = 0 and return the last x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softshrink

from .checks import check_finite, choice, positive, whole
from .momentum import MomentumNet
from .revnet import RevNet

FORMS = ("resnet", "momentum", "revnet")


def lasso(x: Tensor, y: Tensor, D: Tensor, lam: float) -> Tensor:
    """L_y(x), one value per row of x and y."""
    return (y - x @ D.t()).square().sum(-1) / 2 + lam * x.abs().sum(-1)


def ista(y: Tensor, D: Tensor, lam: float, steps: int) -> Tensor:
    """x after `steps` iterations of ISTA from 0, with step size η = 1/‖D‖²."""
    eta, x = step_size(D), y.new_zeros(*y.shape[:-1], D.shape[1])
    for _ in range(whole("steps", steps, 0)):
        x = softshrink(x - eta * (x @ D.t() - y) @ D, eta * lam)
    return x


def step_size(D: Tensor) -> float:
    """η = 1/‖D‖², the largest step size for which ISTA is proved to descend."""
    return float(1 / torch.linalg.matrix_norm(D.detach().double(), 2) ** 2)


class Shrink(nn.Module):
    """One layer g(x, y) = ST(W¹x + W²y, ηλ), or its residual f = g − x.

    Args:
        D: the dictionary, (d, p); at first the layer is a step of ISTA with it.
        lam: λ.
        form: "block" returns g, "branch" returns f.
    """

    def __init__(self, D: Tensor, lam: float, form: str = "block") -> None:
        super().__init__()
        eta = step_size(D)
        self.form, self.threshold = choice("form", form, ("block", "branch")), eta * lam
        self.W1 = nn.Parameter(torch.eye(D.shape[1], dtype=D.dtype, device=D.device) - eta * D.t() @ D)
        self.W2 = nn.Parameter(eta * D.t().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        g = softshrink(x @ self.W1.t() + y @ self.W2.t(), self.threshold)
        return g if self.form == "block" else g - x

    def extra_repr(self) -> str:
        return f"form={self.form!r}, threshold={self.threshold:.4g}"


class Lista(nn.Module):
    """y ↦ an approximate solution of the Lasso, in `depth` learned layers.

    Args:
        D: the dictionary, (d, p).
        lam: λ.
        depth: layers L.
        form: "resnet" (LISTA), "momentum" or "revnet".
        gamma: γ of the momentum form.
        options: `memory`, `fixed_point`, `verify`, `overflow`, as in `MomentumNet`.

    Shape:
        y: (N, d) → x: (N, p).

    "resnet" and "momentum" have the same state_dict. Before training, "resnet" is `depth` steps of ISTA.

    >>> D = torch.randn(4, 8)
    >>> net = Lista(D, lam=0.1, depth=5, form="momentum", gamma=0.5)
    >>> net(torch.randn(3, 4)).shape
    torch.Size([3, 8])
    """

    def __init__(
        self, D: Tensor, lam: float, depth: int, form: str = "resnet", gamma: float = 0.9, **options: Any
    ) -> None:
        super().__init__()
        if not isinstance(D, Tensor) or D.dim() != 2:
            raise ValueError(f"D must be a matrix (d, p); got {tuple(D.shape) if isinstance(D, Tensor) else D!r}.")
        check_finite(D, "D")
        self.form, self.lam, depth = choice("form", form, FORMS), positive("lam", lam), whole("depth", depth)
        self.D: Tensor
        self.register_buffer("D", D.detach().clone())
        self.net: MomentumNet | RevNet
        if form == "revnet":
            phi, psi = ([Shrink(D, lam, "branch") for _ in range(depth)] for _ in range(2))
            self.net = RevNet(phi, psi, **options)
        else:
            blocks = [Shrink(D, lam) for _ in range(depth)]
            self.net = MomentumNet(blocks, gamma if form == "momentum" else 0, form="block", **options)

    def forward(self, y: Tensor) -> Tensor:
        check_finite(y, "y")
        d, p = self.D.shape
        if y.dim() != 2 or y.shape[1] != d:
            raise ValueError(f"y must be (N, {d}) for this D of shape ({d}, {p}); got {tuple(y.shape)}.")
        if self.form == "revnet":
            return self.net(y.new_zeros(len(y), 2 * p), y)[:, p:]
        return self.net(y.new_zeros(len(y), p), y)

    def loss(self, y: Tensor) -> Tensor:
        """The mean Lasso cost of the output: the loss to train on, which needs no solutions."""
        return lasso(self(y), y, self.D, self.lam).mean()

    def extra_repr(self) -> str:
        return f"form={self.form!r}, lam={self.lam:g}"


def dictionary(d: int = 16, p: int = 32, *, generator: torch.Generator | None = None) -> Tensor:
    """A Gaussian D with columns of norm 1."""
    D = torch.randn(d, p, generator=generator)
    return D / D.norm(dim=0)


def samples(n: int, D: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """n Gaussian y, scaled so that ‖Dᵀy‖∞ = 1: the solution is 0 exactly if λ ≥ 1."""
    y = torch.randn(n, D.shape[0], generator=generator, dtype=D.dtype)
    return y / (y @ D).abs().amax(1, keepdim=True)
