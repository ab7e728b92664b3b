"""The recurrence in floats, forwards only: for the largest values of a pass of which nothing is known yet.

It is run once, before the first pass; on 64-bit integers, which could hold anything as well, that pass would take twice the memory
of all later ones. And where a first pass without gradients did not fit those either, the next one (`calibrate.wide`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import RangeOverflow
from ..core.fixedpoint import FixedPoint, integer_dtype
from .momentum import Momentum, Recurrence


class Rough(Momentum):
    """x and v as floats."""

    def __init__(self, x0: Tensor, recurrence: Recurrence, overflow: str) -> None:
        super().__init__(
            x0, recurrence, FixedPoint(0, integer_dtype(x0.dtype)), reversible=False, overflow=overflow
        )  # fmt: skip

    def token(self) -> Tensor:
        raise RangeOverflow(
            "the blocks before were run without gradients, and in floats, because an earlier pass had left its range: floats cannot be "
            "reversed. Run it once without gradients from its first block to its last, so that its range is found."
        )

    def read(self) -> Tensor:
        return self._float().copy_(self.x)

    def read_velocity(self) -> Tensor:
        return self._float().copy_(self.v)

    def advance(self, k: int, y: Tensor, mask: Tensor | None = None) -> Tensor:
        _, _, gamma, factor = self.recurrence.factors[k]
        f = y.detach().to(self.fixed.work)
        form = self.form(k)
        if form:
            x = self.read().to(self.fixed.work)
            f = (torch.relu((x + f).to(y.dtype).to(x.dtype)) if form == 2 else f) - x
        self.v.mul_(gamma).add_(f, alpha=factor)
        self.x.add_(self.v)
        self.rows[k + 1].copy_(torch.stack([_largest(self.v), _largest(self.x)]))
        self._check(k + 1)
        return self.read()

    def _encoded(self, x: Tensor, velocity: bool = False) -> Tensor:
        self.limits = (torch.finfo(self.fixed.work).max, torch.finfo(self.dtype).max)  # of floats
        self.rows[0][int(not velocity)] = _largest(x.detach()).float()
        self._check(0)
        return torch.empty_like(x, dtype=self.fixed.work).copy_(x.detach())


def _largest(t: Tensor) -> Tensor:
    """The largest magnitude; NaN if there is any."""
    if not t.numel():
        return t.new_zeros(())
    low, high = torch.aminmax(t)
    return torch.maximum(-low, high)
