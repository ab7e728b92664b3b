"""The gradient of a momentum step. The step is linear in x and v, so its gradient needs no values. With s = gx + gv:

    gy = gain·s      gv ← γ·s      gx ← gx

but gx ← gx − gy for form "block", and for form "relu" where the relu stops its input.

gv is a multiple of gy, which the block is given anyway. So token v carries gy of the step after, and gv is γ/gain times that
(`Recurrence.carried`). At the last step of a pass gv is 0, and gx is a multiple of gy too: it is left out, and the step
before makes it. What a block's backward pass holds besides its own tensors is one array, and none in the last block.

In `vjp`: p and h are the gradients of tokens x and v after the step, d is that of the float x. e and e1 are what makes gx of gy
where it was left out: where a relu stopped its input, and where it passed it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arithmetic.reference import carried, scaled, unpacked
from .forms import add, launched
from .recurrence import FORMS, Recurrence
from .scheme import Gradient, Gradients, keeps_graph, laid_out, traced


class MomentumGradient(Gradient):
    """How gradients pass through a momentum step; token 0 is of x, token 1 of v.

    Attributes:
        strides: of the state: in this layout are the gradients and the masks.
        forms: by layer, what its block computes, by its number among `FORMS`; the last entry is for what made v₀.
        masks: by layer, where its relu passed its input, one bit an element.
        output_dtypes: by layer, of the blocks' outputs.
    """

    def __init__(self, recurrence: Recurrence, dtype: torch.dtype, kernels: Any, strides: tuple[int, ...]) -> None:
        super().__init__(dtype, recurrence)
        self.kernels = kernels
        self.strides = strides
        self.forms = [FORMS.index(recurrence.form)] * (len(recurrence.gammas) + 1)
        self.masks: dict[int, Tensor] = {}
        self.output_dtypes: dict[int, torch.dtype] = {}

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        p, h = tokens
        if k < 0:
            return launched(self, add(p, d, self.dtype), None if h is None else h * self.recurrence.carried[0][0])
        if d is None:
            like = h if h is not None else p
            if like is None:
                return [None, None], None
            d = like.new_zeros(()).expand(like.shape)
        numbers = (*self.recurrence.carried[k + 1], self.recurrence.factors[k][3], self.forms[k])
        after = self.masks.get(k + 1) if p is None and h is not None else None
        mask = self.mask(k) if self.forms[k] == 2 else None
        left_out = p is None and h is None and wanted[1] and k > 0
        gx: Tensor | None
        if traced(p, h, d):  # out of place, so that it can be differentiated
            passed, passed_after = (None if m is None else unpacked(m, d.shape, self.strides) for m in (mask, after))
            gx, exact = carried(p, h, d, numbers, passed, passed_after)
            gx, gy = gx.to(self.dtype), exact.to(self.dtype)
            given = exact if passed is None else torch.where(passed, exact, 0)
        else:
            p, h, d = (None if g is None else laid_out(g, self.strides) for g in (p, h, d))
            assert d is not None
            gy = torch.empty_like(d, dtype=self.dtype)
            gx = p if p is not None or left_out else torch.empty_like(gy)  # p is an array of ours, made one step before
            given = gy
            if self.output_dtypes[k] != self.dtype or mask is not None:
                given = torch.empty_like(gy, dtype=self.output_dtypes[k])
            self.kernels.carry(p, h, d, *numbers, gx, gy, given, mask, after)
        if left_out:
            gx = None
            if k in self.observed:  # else the step before makes gx of gy
                _, e, e1 = self.recurrence.carried[k]
                gx = scaled(gy, e, e1, None if mask is None else unpacked(mask, gy.shape, self.strides))
        return [gx, gy if wanted[1] else None], given

    def leave(self, gradient: Tensor) -> Gradients:
        """From the gradient of v as a float."""
        return [None, gradient.to(self.dtype)]

    def mask(self, k: int) -> Tensor:
        """Where the relu of block k passed its input. The masks above are let go of, unless the graph is to be run through again."""
        masks = self.masks
        if k not in masks:
            raise RuntimeError(
                "The backward pass of this network has run. To run it twice, pass retain_graph=True to the first."
            )
        if not keeps_graph():
            masks.pop(k + 2, None)
            if k == 0:
                masks.pop(1, None)
                return masks.pop(0)
        return masks[k]
