"""Which information buffers a network has: where each begins, and how wide it is.

Multiplying an integer by n/d pops a digit base n from the buffer and pushes one base d (see `multiply`), so the buffer's
largest possible value is known before anything runs:

    B₀ = 0        B_{k+1} = (B_k div n)·d + d − 1

Per element this costs about k·log2(1/γ) + log2(n·d) bits for k layers: the first term is what any reversible multiplication
must keep, the second is paid once per buffer. The dtype follows from the bound; where the bound would pass the dtype, the
buffer is put away and a fresh one begun, so depth is unlimited. Of all layouts this takes the one that holds least, and of
those the one whose steps read and write least: two uint8 rather than one int16, where both would do.

The layout is part of what the network computes: the digits popped from a buffer decide the last bit of v. Not so where every γ is
1/2^k: then nothing is popped. So there k bits a layer are held and no more: the digits fill one byte after another, and one that does
not fit a byte is divided between two (`straddles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import torch

_LARGEST = {None: 0, torch.uint8: 2**8 - 1, torch.int16: 2**15 - 1, torch.int32: 2**31 - 1}
_SEARCHED = 1000
"""Layers up to which every layout is tried where γ differs between them; beyond, the widest buffers are taken as they come."""


def next_bound(bound: int, gamma: Fraction) -> int:
    """The largest value of the buffer after one more multiplication by γ, if it was at most `bound`."""
    n, d = gamma.numerator, gamma.denominator
    return bound if n == d or n == 0 else (bound // n) * d + d - 1


def powers(gammas: Sequence[Fraction]) -> list[int] | None:
    """The k of every γ = 1/2^k, if each is 1, 0 or one that pushes at most a byte."""
    if any(g.numerator > 1 or g.denominator > 256 or g.denominator & (g.denominator - 1) for g in gammas):
        return None
    return [g.denominator.bit_length() - 1 for g in gammas]


def straddles(gammas: Sequence[Fraction]) -> dict[int, int]:
    """The layers whose digit is divided between two bytes, and how many of its bits the first one takes.

    >>> straddles([Fraction(1, 8)] * 8)
    {2: 2, 5: 1}
    """
    bits, found, total = powers(gammas) or (), {}, 0
    for k, more in enumerate(bits):
        free = -total % 8
        if 0 < free < more:
            found[k] = free
        total += more
    return found


def buffers(gammas: Sequence[Fraction]) -> dict[int, torch.dtype | None]:
    """The layers at which a fresh buffer begins, and its dtype (None: no buffer is needed).

    >>> buffers([Fraction(9, 10)] * 24)
    {0: torch.uint8, 16: torch.uint8}
    >>> buffers([Fraction(9, 10)] * 200)
    {0: torch.int16, 61: torch.int32}
    >>> list(buffers([Fraction(1, 8)] * 8))
    [0, 2, 5]
    """
    bits = powers(gammas)
    if bits is not None:
        totals = [0, *accumulate(bits)]
        fresh: dict[int, torch.dtype | None] = {
            k: torch.uint8 for k in range(len(bits)) if -(-totals[k + 1] // 8) > -(-totals[k] // 8)
        }
        return fresh if 0 in fresh else {0: None, **fresh}
    depth = len(gammas)
    lengths = _lengths(gammas) if len(set(gammas)) == 1 else None
    searched = lengths is not None or depth <= _SEARCHED
    ends: dict[int, dict[torch.dtype | None, int]] = {}  # by start: how far each dtype lasts
    starts = {0}
    for start in range(depth):
        if start in starts:
            found = _lengths(gammas[start:]) if lengths is None else lengths
            if not searched and start + found[torch.int32] < depth:
                found = {torch.int32: found[torch.int32]}
            ends[start] = {dtype: min(start + length, depth) for dtype, length in found.items()}
            starts.update(ends[start].values())
    best: dict[int, tuple[int, int]] = {depth: (0, 0)}  # by start: bytes held from there on, bytes moved
    taken: dict[int, torch.dtype | None] = {}
    for start in reversed(ends):
        costs = {dtype: _cost(dtype, end - start, best[end]) for dtype, end in ends[start].items()}
        taken[start] = min(costs, key=costs.__getitem__)
        best[start] = costs[taken[start]]
    begins, start = {}, 0
    while start < depth:
        begins[start] = taken[start]
        start = ends[start][taken[start]]
    return begins


def _cost(dtype: torch.dtype | None, layers: int, rest: tuple[int, int]) -> tuple[int, int]:
    width = 0 if dtype is None else dtype.itemsize
    return rest[0] + width, rest[1] + width * layers


def _lengths(gammas: Sequence[Fraction]) -> dict[torch.dtype | None, int]:
    """For how many of these layers a buffer of each dtype lasts, leaving out dtypes that do not last for one."""
    lengths, left, bound = {}, dict(_LARGEST), 0
    for k, gamma in enumerate(gammas):
        bound = next_bound(bound, gamma)
        for dtype in [dtype for dtype, largest in left.items() if bound > largest]:
            lengths[dtype] = k
            del left[dtype]
        if not left:
            break
    return {dtype: length for dtype, length in (lengths | dict.fromkeys(left, len(gammas))).items() if length}
