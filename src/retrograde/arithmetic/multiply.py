"""Multiplication of integers by a ratio n/d that loses nothing.

    forward   u = i mod n   i ← i div n   U = v·n + u   v ← U div d   i ← i·d + (U mod d)
    inverse   the same map with n and d exchanged

(v, u) ↔ U ↔ (v', r) are bijections, so what the division by d would lose, the remainder r, goes into the information
buffer i, and the digit u popped from it makes room. The paper's Algorithm 1 (from Maclaurin et al., 2015) pushes first and
pops after: just as exact, but it multiplies a rounded value by n and so disturbs v by up to n units in
the last place. Popping first keeps v within one unit of γ·v, so 32-bit values suffice. All divisions are floor divisions.

For 1/2^k nothing is popped, and the remainder is the last k bits of v: shifts and masks do it (`push`, and `pop` for the way
back), with the same result. Such a digit may be divided between two buffers (see `buffers`).
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


def shift(n: int, d: int) -> int:
    """k if n/d = 1/2^k, −k if it is 2^k, 0 if it is neither.

    >>> shift(1, 8), shift(8, 1), shift(3, 8), shift(1, 1), shift(0, 1)
    (3, -3, 0, 0, 0)
    """
    power = n > 0 and min(n, d) == 1 and n * d & (n * d - 1) == 0
    return d.bit_length() - n.bit_length() if power else 0


def push(v: Tensor, i: Tensor, k: int, before: Tensor | None = None, over: int = 0) -> None:
    """`multiply` by 1/2^k in place. The lowest `over` of the k bits go to the buffer before, which they fill."""
    u = v.int() if v.dtype == torch.int16 else v  # a mask may be wider than 16 bits
    if before is not None:
        before.bitwise_left_shift_(over).bitwise_or_((u & ((1 << over) - 1)).to(i.dtype))
    i.bitwise_left_shift_(k - over).bitwise_or_(((u >> over) & ((1 << (k - over)) - 1)).to(i.dtype))
    v.bitwise_right_shift_(k)


def pop(v: Tensor, i: Tensor, k: int, before: Tensor | None = None, over: int = 0) -> None:
    """The inverse of `push`."""
    for buffer, bits in ((i, k - over), (before, over)):
        if buffer is not None:
            v.bitwise_left_shift_(bits).bitwise_or_((buffer & ((1 << bits) - 1)).to(v.dtype))
            buffer.bitwise_right_shift_(bits)


def _divmod(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    q = torch.div(a, b, rounding_mode="floor")
    return q, a - q * b
