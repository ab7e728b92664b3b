"""What each memory mode keeps from forward to backward, and which plan is quickest within a budget.

    "reverse"      x, v and the information buffers, once, whatever the depth
    "checkpoint"   every block's input
    "store"        whatever autograd saves

With a budget, the blocks nearest to the output keep their tensors, as in "store", and only those below them are run again: the
state of "reverse" is that of the layer where they begin. What a block would keep is measured while it keeps nothing, on
the first pass with an input of its kind. No plan changes a bit of any result.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.call import Call
from ..core.fixedpoint import integer_dtype
from .momentum import Recurrence

MODES = ("reverse", "checkpoint", "store", "auto")
REPLAY = {"reverse": 1.0, "checkpoint": 0.75, "store": 0.0}
"""Time to run a block again, by mode: a kept input needs no integer steps back, and nothing after the last tensor saved."""


_KINDS = 64  # of input that are remembered


@dataclass(frozen=True)
class Plan:
    """How a pass is remembered: the first blocks by `mode`, the last ones stored."""

    mode: str
    depth: int
    stored: int  # how many blocks, counted from the output, keep their tensors
    bytes: int | None  # held from forward to backward, as predicted; None: not known

    @property
    def replayed(self) -> int:
        """How many blocks are run again in backward."""
        return self.depth - self.stored

    @property
    def cost(self) -> float:
        """The time that this takes, in forward passes of a block."""
        return self.replayed * REPLAY[self.mode]


def holding(recurrence: Recurrence, dtype: torch.dtype, depth: int | None = None) -> dict[str, int]:
    """Bytes held per element of x for the first `depth` layers, by mode. A plain step (γ = 0) cannot be reversed.

    >>> from fractions import Fraction
    >>> holding(Recurrence((Fraction(9, 10),) * 3, residual=False), torch.bfloat16)
    {'checkpoint': 6, 'reverse': 9}
    """
    depth = len(recurrence.gammas) if depth is None else depth
    held = {"checkpoint": dtype.itemsize * depth}
    if 0 not in recurrence.gammas[:depth]:
        buffers = sum(b.itemsize for k, b in recurrence.begins.items() if b and k < depth)
        held["reverse"] = 2 * integer_dtype(dtype, recurrence.narrow).itemsize + buffers
    return held


def cheapest(recurrence: Recurrence, dtype: torch.dtype) -> str:
    """The mode that needs least; "checkpoint" where it is a tie.

    A reversal runs each block to its end, where checkpointing stops at the last tensor that autograd wants: it has up to three
    more activations at hand (the block's output and what leads to it). The others keep the input of the stack beside the
    caller's own.
    """
    needed = holding(recurrence, dtype)
    for mode in needed:
        needed[mode] += dtype.itemsize * (3 if mode == "reverse" else 1)
    return min(needed, key=needed.__getitem__)


def leanest(recurrence: Recurrence, x: Tensor, mode: str = "auto") -> Plan:
    """The plan without a budget: every block by one mode; "auto" is the one that holds least."""
    mode, depth = cheapest(recurrence, x.dtype) if mode == "auto" else mode, len(recurrence.gammas)
    if mode == "store":
        return Plan(mode, depth, depth, None)
    return Plan(mode, depth, 0, x.numel() * holding(recurrence, x.dtype)[mode])


class Weights:
    """What each block would keep if it were stored, and what it keeps to be run again, as seen in a pass in which it is not.

    Args:
        known: tensors that are there anyway: parameters, buffers, extra inputs.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.stored: dict[int, int] = {}  # bytes, by block; −1 is what makes the initial velocity, if anything does
        self.replayed: dict[int, int] = {}  # states of random generators

    def __call__(self, k: int, call: Call, tensors: list[Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.stored[k] = sum(n for address, n in storages.items() if address not in self.known)
        states = [state for state in call.places[1] if state.data_ptr() not in self.known]
        self.known |= {state.data_ptr() for state in states}
        self.replayed[k] = sum(state.nbytes for state in states)


def within(budget: int, recurrence: Recurrence, x: Tensor, weights: Weights, verify: str) -> Plan:
    """The quickest plan, of those that hold no more than the budget.

    Raises:
        ValueError: if none does.
    """
    depth, size, launched = len(recurrence.gammas), x.numel(), -1 in weights.stored
    plans = [Plan("store", depth, depth, sum(weights.stored.values()))]
    for replayed in range(1, depth + 1):
        stored = sum(n for k, n in weights.stored.items() if k >= replayed)
        states = [n for k, n in weights.replayed.items() if k < replayed and n]
        stored += sum(states) if len(states) > 1 else 0  # one is there anyway
        for mode, per_element in holding(recurrence, x.dtype, replayed).items():
            if mode == "checkpoint":
                per_element += launched * x.dtype.itemsize
            plans.append(Plan(mode, depth, depth - replayed, stored + size * per_element))
    fitting = [plan for plan in plans if plan.bytes is not None and plan.bytes <= budget]
    if not fitting:
        least = min(plan.bytes for plan in plans if plan.bytes is not None)
        raise ValueError(
            f"budget = {budget} bytes is not enough for an input of shape {tuple(x.shape)}: the least that can be held from "
            f"forward to backward is {least}. Give more, a smaller batch, or budget=None."
        )
    return min(fitting, key=lambda plan: (plan.cost, plan.bytes))


class Planner:
    """The plans of a network within its budget, by kind of input: the leanest, until it is known what the blocks would keep."""

    def __init__(self, budget: Any) -> None:
        self.budget = budget
        self.plans: dict[Hashable, tuple[Recurrence, Plan]] = {}
        self.weights: dict[Hashable, Weights] = {}

    def plan(self, kind: Hashable, recurrence: Recurrence, x: Tensor, known: Iterable[Tensor], verify: str) -> Plan:
        """The plan for this pass. If `unknown(kind)`, the pass is to show its blocks' tensors to `weights[kind]`.

        Args:
            kind: what decides, besides the network, which tensors the blocks keep.
            known: tensors that are there anyway.
        """
        if self.unknown(kind, len(recurrence.gammas)):
            if len(self.weights) >= _KINDS:
                self.weights.pop(next(iter(self.weights)))
            self.weights[kind] = Weights(known)
            return leanest(recurrence, x)
        if kind not in self.plans or self.plans[kind][0] is not recurrence:
            if len(self.plans) >= _KINDS:
                self.plans.pop(next(iter(self.plans)))
            budget = as_bytes(self.budget, x.device)
            self.plans[kind] = recurrence, within(budget, recurrence, x, self.weights[kind], verify)
        return self.plans[kind][1]

    def unknown(self, kind: Hashable, depth: int) -> bool:
        """Whether no pass with an input of this kind has been through to its end."""
        return kind not in self.weights or depth - 1 not in self.weights[kind].stored


def as_bytes(budget: Any, device: torch.device) -> int:
    """A budget in bytes: as given, or as a fraction of the device's memory."""
    if isinstance(budget, int):
        return budget
    if device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        total = torch.get_device_module(device).get_device_properties(device).total_memory
    return int(budget * total)


def check_budget(budget: Any, memory: str) -> None:
    """Raise unless this is a budget that this memory mode can have."""
    if budget is None:
        return
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0
    if not whole and not (isinstance(budget, float) and 0 < budget <= 1):
        raise ValueError(
            f"budget must be None, a whole number of bytes, or a fraction of the device's memory in (0, 1]; got {budget!r}."
        )
    if memory != "auto":
        raise ValueError(f"a budget is for memory='auto'; here memory={memory!r}. Set budget=None, or memory='auto'.")
