"""The paper's multiplication by n/d, for comparison; the library's own is `core.multiply`.

forward   i ← i·d + (v mod d)   v ← v div d   v ← v·n + (i mod n)   i ← i div n
inverse   the same map with n and d exchanged
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_ref(v: Tensor, i: Tensor, n: int, d: int) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of [sander2021, App. D], in 64 bits: push the remainder mod d, then pop a digit mod n."""
    q, r = _divmod(v.long(), d)
    rest, u = _divmod(i.long() * d + r, n)
    return q * n + u, rest


def divide_ref(v: Tensor, i: Tensor, n: int, d: int) -> tuple[Tensor, Tensor]:
    """The exact inverse of `multiply_ref(·, ·, n, d)`."""
    return multiply_ref(v, i, d, n)


def _divmod(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    q = torch.div(a, b, rounding_mode="floor")
    return q, a - q * b
