"""Multiplication of integers by a ratio n/d that loses nothing.

    forward   u = i mod n   i ← i div n   U = v·n + u   v ← U div d   i ← i·d + (U mod d)
    inverse   the same map with n and d exchanged

(v, u) ↔ U ↔ (v', r) are bijections, so what the division by d would lose, the remainder r, goes into the information
buffer i, and the digit u popped from it makes room. The paper's Algorithm 1 (from Maclaurin et al., 2015) pushes first and
pops after: just as exact, but it multiplies a rounded value by n and so disturbs v by up to n units in
the last place. Popping first keeps v within one unit of γ·v, so 32-bit values suffice. All divisions are floor divisions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(v: Tensor, i: Tensor, n: int, d: int) -> tuple[Tensor, Tensor]:
    """v·n/d to within one unit, and the buffer from which v is recovered, with n and d exchanged.

    v is split as q·d + r₀, so intermediate values stay below |v| and n·d + n.

    >>> v, i = torch.tensor([7, -7, 2**30]), torch.zeros(3, dtype=torch.int64)
    >>> v1, i1 = multiply(v, i, 9, 10)
    >>> v1
    tensor([        6,        -7, 966367641])
    >>> all(torch.equal(a, b) for a, b in zip(multiply(v1, i1, 10, 9), (v, i)))
    True
    """
    v64, i64 = v.long(), i.long()
    rest, u = _divmod(i64, n)
    q, r0 = _divmod(v64, d)
    carry, r = _divmod(r0 * n + u, d)
    return (q * n + carry).to(v.dtype), (rest * d + r).to(i.dtype)


def _divmod(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    q = torch.div(a, b, rounding_mode="floor")
    return q, a - q * b
