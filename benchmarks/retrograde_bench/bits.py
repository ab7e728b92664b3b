"""Bytes held per element of x and layer, against the least that a reversible network can hold.

Any state of two 32-bit numbers and an exactly reversible multiplication by γ must keep

    64 + k·log2(1/γ)    bits per element after k layers

since multiplying by γ throws log2(1/γ) bits away, and they must be somewhere. What we hold is the same 64 bits, and
information buffers of whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from retrograde.core.rational import as_ratios
from retrograde.memory.modes import holding
from retrograde.stack.momentum import Recurrence

DEPTHS = (8, 16, 24, 61, 96, 166, 600, 1000)
HEADER = (
    "γ",
    "layers k",
    "held, B",
    "ideal, B",
    "held / ideal",
    "held, B / layer",
    "ideal, B / layer",
    "checkpoint fp32",
    "checkpoint bf16",
)


def ideal_bytes(gamma: float, depth: int) -> float:
    """(64 + k·log2(1/γ)) / 8.

    >>> ideal_bytes(0.5, 8)
    9.0
    """
    return (64 + depth * math.log2(1 / gamma)) / 8


def held_bytes(gamma: float, depth: int) -> int:
    """What memory="reverse" holds per element of a float32 x.

    >>> held_bytes(0.9, 16)
    9
    """
    return _holding(gamma, depth, torch.float32)["reverse"]


def table(gammas: Sequence[float] = (0.5, 0.9, 0.99), depths: Sequence[int] = DEPTHS) -> list[list[str]]:
    """Header and rows."""
    rows = [list(HEADER)]
    for gamma in gammas:
        for k in depths:
            held, ideal = held_bytes(gamma, k), ideal_bytes(gamma, k)
            rows.append([
                f"{gamma:g}", str(k), str(held), f"{ideal:.2f}", f"{held / ideal:.2f}", f"{held / k:.3f}", f"{ideal / k:.3f}",
                str(_holding(gamma, k, torch.float32)["checkpoint"] // k), str(_holding(gamma, k, torch.bfloat16)["checkpoint"] // k),
            ])  # fmt: skip
    return rows


def _holding(gamma: float, depth: int, dtype: torch.dtype) -> dict[str, int]:
    return holding(Recurrence(as_ratios(gamma, depth), form="branch"), dtype)
