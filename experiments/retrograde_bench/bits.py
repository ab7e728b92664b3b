"""Bytes held per element of x and layer, against the least that a reversible network can hold.

Any state of two 32-bit numbers and an exactly reversible multiplication by γ must keep

    64 + k·log2(1/γ)    bits per element after k layers

since multiplying by γ throws log2(1/γ) bits away, and they must be somewhere. What we hold is the same 64 bits, and
information buffers of whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

import retrograde as rg

DEPTHS = (8, 16, 24, 61, 96, 166, 600, 1000)
GAMMAS = (0.125, 0.5, 0.9, 0.99)
HEADER = ("γ", "layers k", "held, B", "ideal, B", "held / ideal", "held, B / layer", "ideal, B / layer")


def ideal_bytes(gamma: float, depth: int) -> float:
    """(64 + k·log2(1/γ)) / 8.

    >>> ideal_bytes(0.5, 8)
    9.0
    """
    return (64 + depth * math.log2(1 / gamma)) / 8


@cache
def held_bytes(gamma: float, depth: int) -> int:
    """What the state holds of one element of a float32 x after so many layers, read off a state.

    >>> held_bytes(0.9, 16)
    9
    """
    state = rg.MomentumNet([nn.Identity()] * depth, gamma=gamma, form="block", memory="reverse").encode(torch.ones(1))
    return sum({t.data_ptr(): t.nbytes for t in (state.held.x, state.held.v, *state.held.buffers.values())}.values())


def table(gammas: Sequence[float] = GAMMAS, depths: Sequence[int] = DEPTHS) -> list[list[str]]:
    """Header and rows."""
    rows = [list(HEADER)]
    for gamma in gammas:
        for k in depths:
            held, ideal = held_bytes(gamma, k), ideal_bytes(gamma, k)
            rows.append([
                f"{gamma:g}", str(k), str(held), f"{ideal:.2f}", f"{held / ideal:.2f}", f"{held / k:.3f}", f"{ideal / k:.3f}",
            ])  # fmt: skip
    return rows
