"""A hash by which it is seen whether a block repeated itself.

`digest` is a 64-bit hash of a tensor's bits and their places. The memory is read as 32-bit words w in rows of 16 (the last filled up
with zeros), and the left half of each row is multiplied with the right one, after adding keys that differ from place to place
(NH of Black, Halevi, Krawczyk, Krovetz and Rogaway, 1999):

    Σ (w_j + k_j mod 2^32) · (w_{j+8} + k'_j mod 2^32)   mod 2^64

One product for two words, a sum in any order; tensors that differ in one word have the same with a chance of 2^−32, in
several, of about 2^−64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from .ops import bodies, values

_PIECE, _LOW = 1 << 20, 2**32 - 1
KEYS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


def digest(t: Tensor, into: Tensor | None = None, seed: int = 0, sign: int = 1) -> Tensor:
    """Add sign times the hash of t to `into`, a 64-bit integer on its device; that integer. `seed` tells tensors apart.

    >>> a = torch.arange(6.0)
    >>> bool(digest(a) == digest(a.clone())), bool(digest(a) == digest(a.flip(0)))
    (True, False)
    """
    t = values(getattr(t, "_local_tensor", t).detach()).resolve_neg()
    into = torch.zeros((), dtype=torch.int64, device=t.device) if into is None else into
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    if not t.is_contiguous():  # any dense layout is taken as it lies in memory
        t = t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).contiguous()
    faster = getattr(bodies(t), "digest", None) if type(t) in (Tensor, Parameter) else None
    if t.numel() and (faster is None or not faster(t, into, seed, sign)):
        into += sign * digest_ref(words(t), seed)
    return into


def words(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 32-bit integers."""
    flat = t if t.stride() == (1,) else t.reshape(-1)
    if flat.nbytes % 4 or flat.storage_offset() * flat.itemsize % 4:
        flat = flat.view(torch.uint8)
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


def digest_ref(w: Tensor, seed: int) -> Tensor:
    """The hash of 32-bit words, by its definition."""
    total = torch.zeros((), dtype=torch.int64, device=w.device)
    for start in range(0, w.numel(), _PIECE):
        piece = w[start : start + _PIECE].long() & _LOW
        left, right = torch.nn.functional.pad(piece, (0, -piece.numel() % 16)).view(-1, 2, 8).unbind(1)
        place = torch.arange(start // 2, start // 2 + left.numel(), device=w.device).view_as(left)
        k = (place * KEYS[0] + seed + KEYS[2]) & _LOW
        k = ((k ^ (k >> 15)) * KEYS[1]) & _LOW
        k = k ^ (k >> 13)
        total += (((left + k) & _LOW) * ((right + k * KEYS[2]) & _LOW)).sum()
    return total


def checksum(t: Tensor) -> int:
    """The hash as a number: waits for the device."""
    return int(digest(t))
