"""A 64-bit hash of a tensor's bits and their places, by which a replay is recognised.

The memory is read as 32-bit words w in rows of 16 (the last filled up with zeros), and the left half of each row is multiplied
with the right one, after adding keys that differ from place to place (NH of Black, Halevi, Krawczyk, Krovetz and Rogaway, 1999):

    Σ (w_j + k_j mod 2^32) · (w_{j+8} + k'_j mod 2^32)   mod 2^64

One product for two words, a sum in any order. Tensors that differ in one word have the same hash with a chance of 2^−32, in
several words, of about 2^−64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .kernels import kernels_for


def digest(t: Tensor, into: Tensor | None = None, seed: int = 0, sign: int = 1) -> Tensor:
    """Add sign times the hash of t to `into`, a 64-bit integer on its device; returns that integer. `seed` tells tensors apart.

    >>> a = torch.arange(6.0)
    >>> bool(digest(a) == digest(a.clone())), bool(digest(a) == digest(a.flip(0)))
    (True, False)
    """
    t = getattr(t, "_local_tensor", t).detach()
    t = (t if type(t) is Tensor or isinstance(t, FakeTensor) else t.clone()).resolve_neg()
    into = torch.zeros((), dtype=torch.int64, device=t.device) if into is None else into
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    if not t.is_contiguous():  # any dense layout is taken as it lies in memory
        t = t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).contiguous()
    if t.numel():
        kernels_for(t).digest(t, into, seed, sign)
    return into
