"""γ of random sign: in training each sample of each block draws +γ or −γ; in evaluation the network is the plain one.

    forward   v ← s·γ·v + (1 − s·γ)·f(x)     x ← x + ⌊v⌉              s = 1 or −1, at random
    inverse   x ← x − ⌊v⌉                    v ← s·(v − (1 − s·γ)·f(x)) / γ

A sample is an index of x's first dimension. On average over s a step is the plain network's, x ← x + f(x), which is what
runs in evaluation. To negate an integer loses nothing, so a step negates some rows of v and is then one of `momentum`,
whose f comes with its factor. Signs are drawn once, when the pass begins, from the generator that dropout draws from, and are
kept with the state: 1 byte a sample and block.

With x_{k+1} = x_k + v_{k+1} this is

    x_{k+1} = (1 + s·γ)·x_k − s·γ·x_{k−1} + (1 − s·γ)·f(x_k)

so γ = 1/2 is the recurrence of [zhang2024, On Exact Bit-level Reversible Transformers Without Changing Architectures],
whose γ is −s/2 here, and whose bit a layer is the one that 1/2 pushes.

The gradient of a step, with s·γ for γ in that of `momentum`: gy = (1 − s·γ)·(gx + gv), gv ← s·γ·(gx + gv). So what goes to
the step before is again gy, and gv is s·γ/(1 − s·γ) times that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forms import add, f_of, launched, through_form
from .gradients import MomentumGradient
from .momentum import Momentum
from .range import PassRange
from .recurrence import Recurrence
from .scheme import Gradients, total


class SignedGradient(MomentumGradient):
    """As its base, in plain torch: factors differ from sample to sample."""

    signs: Tensor

    def gamma(self, k: int) -> Tensor:
        """s·γ of step k, to be multiplied with a tensor like x."""
        work = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.signs[k].to(work) * self.recurrence.factors[k][2]

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        p, h = tokens
        gx, gv = add(p, d, self.dtype), h
        if h is not None and k + 1 < len(self.signs):  # after the last step it is v's own gradient
            gamma = self.gamma(k + 1)
            gv = h * (gamma / (1 - gamma))
        if k < 0:
            return launched(self, gx, gv)
        both = total(torch.promote_types(self.dtype, torch.float32), gx, gv)
        if both is None:
            return [None, None], None
        gy = (both * (1 - self.gamma(k))).to(self.dtype)
        gx, given = through_form(self, k, gx, gy)
        return [gx, gy if wanted[1] else None], given


class Signed(Momentum):
    """x, v, the information buffers and the signs of one pass."""

    gradient_type = SignedGradient
    gradient: SignedGradient

    def __init__(
        self, x0: Tensor, recurrence: Recurrence, seen: PassRange, *, reversible: bool, signs: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(x0, recurrence, seen, reversible=reversible)
        self.forms = [0] * len(self.gradient.forms)  # what the kernels are given is f already
        self.gradient.signs = self.drawn(x0) if signs is None else signs

    def drawn(self, x0: Tensor) -> Tensor:
        """A sign for each step and sample."""
        samples = (*x0.shape[:1], *[1] * (x0.dim() - 1))
        drawn = x0.detach().new_empty((len(self.recurrence.gammas), *samples), dtype=torch.int8).random_(0, 2)
        return drawn.mul_(2).sub_(1)

    def anew(self, x0: Tensor, seen: PassRange) -> Signed:
        return Signed(x0, self.recurrence, seen, reversible=self.reversible, signs=self.gradient.signs)

    def take(self, k: int, y: Tensor) -> Tensor:
        f = self._scaled(k, y, forwards=True)
        self._negate(k)
        return super().take(k, f)

    def undo(self, k: int, y: Tensor, further: bool) -> Tensor | None:
        super().undo(k, self._scaled(k, y, forwards=False), False)
        self._negate(k)
        return self.draw(k - 1) if further else None

    def reach(self, k: int, f: float) -> tuple[float, float]:
        x1, v1 = super().reach(k, f)
        more = v1 * self.recurrence.factors[k][2]
        return x1 + more, v1 + more

    def _negate(self, k: int) -> None:
        self.v.mul_(self.gradient.signs[k])

    def _scaled(self, k: int, y: Tensor, forwards: bool) -> Tensor:
        """(1 − s·γ)·f of block k, which gave y."""
        return f_of(self, k, y, forwards) * (1 - self.gradient.gamma(k))
