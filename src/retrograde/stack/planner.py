"""What is kept of each block from forward to backward: the three ways, and plans made of them.

    "reverse"      x, v and the information buffers, once, whatever the depth
    "checkpoint"   the block's input: the float, or its integers where these are narrower
    "store"        whatever autograd saves

A plan takes them in this order, from the first block to the last: the state of "reverse" stays at the layer where the
reversed blocks end. Without a budget a stack has one way for all; which plan is quickest within a budget is worked out from
the memory of a step, interval by interval (`timeline`). No plan changes a bit of any result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..core.fixedpoint import integer_dtype
from .momentum import Recurrence

MODES = ("reverse", "checkpoint", "store", "auto")


@dataclass(frozen=True)
class Plan:
    """How many blocks of a stack, from the first on, are reversed, keep their input, and keep their tensors.

    Attributes:
        peak: bytes at the highest point of a step, as predicted, with a reserve; None: not known.
        cost: the time that running blocks again takes, as bytes of traffic (`timeline`); None: not known.

    >>> print(Plan(12, 23, 0))
    reverse 12, keep input 23
    """

    reversed: int
    kept: int
    stored: int
    peak: int | None = None
    cost: float | None = None

    @classmethod
    def uniform(cls, mode: str, depth: int) -> Plan:
        """Every block the same way."""
        return cls(*(depth * (mode == way) for way in MODES[:3]))

    @property
    def depth(self) -> int:
        return self.reversed + self.kept + self.stored

    @property
    def replayed(self) -> int:
        """How many blocks are run again in backward."""
        return self.reversed + self.kept

    @property
    def mode(self) -> str:
        """The way of the first blocks."""
        return "reverse" if self.reversed else "checkpoint" if self.kept else "store"

    @property
    def arguments(self) -> dict[str, Any]:
        """As arguments of `Forward`."""
        return {"mode": self.mode, "kept_from": self.reversed, "stored_from": self.replayed}

    def __str__(self) -> str:
        """The way, or how many blocks have which."""
        parts = {"reverse": self.reversed, "keep input": self.kept, "store": self.stored}
        several = {name: n for name, n in parts.items() if n}
        return self.mode if len(several) < 2 else ", ".join(f"{name} {n}" for name, n in several.items())


def input_bytes(recurrence: Recurrence, dtype: torch.dtype) -> int:
    """Bytes per element of an input that is kept: the float, or its integers where these are narrower (see `kept`).

    >>> from fractions import Fraction
    >>> input_bytes(Recurrence((Fraction(9, 10),), form="branch", narrow=True), torch.float32)
    2
    """
    integers = any(recurrence.gammas)  # at γ = 0 there are none
    return min(dtype.itemsize, integer_dtype(dtype, recurrence.narrow).itemsize if integers else dtype.itemsize)


def holding(recurrence: Recurrence, dtype: torch.dtype, depth: int | None = None) -> dict[str, int]:
    """Bytes held per element of x for the first `depth` layers, by mode. A plain step (γ = 0) cannot be reversed.

    In form "relu" every mode holds one bit more per element and layer, which is left out here: it changes no choice.

    >>> from fractions import Fraction
    >>> holding(Recurrence((Fraction(9, 10),) * 3, form="branch"), torch.bfloat16)
    {'checkpoint': 6, 'reverse': 9}
    """
    depth = len(recurrence.gammas) if depth is None else depth
    held = {"checkpoint": input_bytes(recurrence, dtype) * depth}
    if 0 not in recurrence.gammas[:depth]:
        buffers = sum(b.itemsize for k, b in recurrence.begins.items() if b and k < depth)
        held["reverse"] = 2 * integer_dtype(dtype, recurrence.narrow).itemsize + buffers
    return held


def cheapest(recurrence: Recurrence, dtype: torch.dtype) -> str:
    """The mode that needs least; "checkpoint" where it is a tie.

    A reversal runs each block to its end, where checkpointing stops at the last tensor that autograd wants: it has up to three
    more activations at hand (the block's output and what leads to it). The others keep the input of the stack beside the
    caller's own, and an input that is kept as integers is at hand as a float besides.
    """
    needed = holding(recurrence, dtype)
    for mode in needed:
        needed[mode] += dtype.itemsize * (
            3 if mode == "reverse" else 1 + (input_bytes(recurrence, dtype) < dtype.itemsize)
        )
    return min(needed, key=needed.__getitem__)


def leanest(recurrence: Recurrence, dtype: torch.dtype, mode: str = "auto") -> Plan:
    """The plan without a budget: every block by one mode; "auto" is the one that needs least."""
    if (dtype, mode) not in recurrence.plans:
        chosen = cheapest(recurrence, dtype) if mode == "auto" else mode
        recurrence.plans[dtype, mode] = Plan.uniform(chosen, len(recurrence.gammas))
    plan: Plan = recurrence.plans[dtype, mode]
    return plan


def as_bytes(budget: Any, device: torch.device) -> int:
    """A budget in bytes: as given, or as a fraction of the device's memory."""
    if isinstance(budget, int):
        return budget
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        total = torch.get_device_module(device).get_device_properties(device).total_memory
    return int(budget * total)


FREE = "free"
"""A budget: what the leanest plan takes at its highest point; elsewhere in the step there may be room below that."""


def check_budget(budget: Any, memory: str, stages: bool = False) -> None:
    """Raise unless this is a budget that this memory mode can have; `stages`: of a model that may have several."""
    if budget is None:
        return
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0
    if not whole and not (isinstance(budget, float) and 0 < budget <= 1) and not (stages and budget == FREE):
        also = f", {FREE!r}" if stages else ""
        raise ValueError(
            f"budget must be None{also}, a whole number of bytes, or a fraction of the device's memory in (0, 1]; got {budget!r}."
        )
    if memory != "auto":
        raise ValueError(f"a budget is for memory='auto'; here memory={memory!r}. Set budget=None, or memory='auto'.")
