"""What is kept of each block from forward to backward: memory modes, and plans made of them.

    "reverse"      x and v, once; and the bits that γ pushes, log2(1/γ) for each element and block
    "checkpoint"   the block's input: the float, or its integers where they are narrower
    "store"        whatever autograd saves
    "auto"         "reverse" or "checkpoint", whichever keeps less
    a budget       from the first block to the last: some reversed, some that keep their input, some stored

A budget is a number of bytes ("8GB", 8e9) or a fraction of the device's memory (0.5). No mode and no plan changes a bit of any
result.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..arithmetic.fixed import integer_dtype
from ..reverse.recurrence import Recurrence
from .units import parse_bytes

if TYPE_CHECKING:
    from .budget import Recorder, Scheduler

MODES = ("reverse", "checkpoint", "store", "auto")


@dataclass(frozen=True)
class MemoryPlan:
    """How many blocks of a stack, from the first on, are reversed, keep their input, and keep their tensors.

    Attributes:
        peak: predicted bytes at the highest point of a step, with a reserve; None if unknown.
        cost: time spent on running blocks again, as bytes of traffic (see `schedule`); None if unknown.

    >>> print(MemoryPlan(12, 23, 0))
    reverse 12, keep input 23
    """

    reversed: int
    kept: int
    stored: int
    peak: int | None = None
    cost: float | None = None

    @classmethod
    def uniform(cls, mode: str, depth: int) -> MemoryPlan:
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
        """The mode of the first block."""
        return "reverse" if self.reversed else "checkpoint" if self.kept else "store"

    def __str__(self) -> str:
        """The mode, or how many blocks have which."""
        parts = {"reverse": self.reversed, "keep input": self.kept, "store": self.stored}
        several = {name: n for name, n in parts.items() if n}
        return self.mode if len(several) < 2 else ", ".join(f"{name} {n}" for name, n in several.items())


def input_bytes(recurrence: Recurrence, dtype: torch.dtype) -> int:
    """Bytes per element of an input that is kept: of the float, or of its integers where they are narrower.

    >>> from fractions import Fraction
    >>> input_bytes(Recurrence((Fraction(9, 10),), form="branch", narrow=True), torch.float32)
    2
    """
    if recurrence.residual:  # a plain network has no integers
        return dtype.itemsize
    return min(dtype.itemsize, integer_dtype(dtype, recurrence.narrow).itemsize)


def buffer_bytes(begins: Mapping[int, torch.dtype | None]) -> int:
    """Bytes per element of the information buffers that begin there."""
    return sum(dtype.itemsize for dtype in begins.values() if dtype)


def holding(recurrence: Recurrence, dtype: torch.dtype) -> dict[str, int]:
    """Bytes held from forward to backward per element of x, by mode. A plain step (γ = 0) cannot be reversed.

    In form "relu" every mode holds one bit more per element and layer. It is left out here: it changes no choice.

    >>> from fractions import Fraction
    >>> holding(Recurrence((Fraction(9, 10),) * 3, form="branch"), torch.bfloat16)
    {'checkpoint': 6, 'reverse': 9}
    """
    held = {"checkpoint": input_bytes(recurrence, dtype) * len(recurrence.gammas)}
    if not recurrence.plain:
        held["reverse"] = 2 * integer_dtype(dtype, recurrence.narrow).itemsize + buffer_bytes(recurrence.begins)
    return held


def cheapest(recurrence: Recurrence, dtype: torch.dtype) -> str:
    """The mode that needs least memory; "checkpoint" where it is a tie.

    A reversal runs each block to its end. Checkpointing stops at the last tensor that autograd saved, so a reversal has up to
    three activations more at hand: the block's output and what leads to it. Checkpointing keeps the input of the stack beside
    the caller's own, and decodes an input that is kept as integers to one float more.
    """
    needed = holding(recurrence, dtype)
    decoded = input_bytes(recurrence, dtype) < dtype.itemsize
    needed["checkpoint"] += dtype.itemsize * (1 + decoded)
    if "reverse" in needed:
        needed["reverse"] += dtype.itemsize * 3
    return min(needed, key=needed.__getitem__)


def leanest(recurrence: Recurrence, dtype: torch.dtype, mode: str = "auto") -> MemoryPlan:
    """The plan without a budget: every block by one mode. "auto" is the one that needs least."""
    chosen = cheapest(recurrence, dtype) if mode == "auto" else mode
    return MemoryPlan.uniform(chosen, len(recurrence.gammas))


@dataclass(eq=False)
class Stack:
    """What the scheduler knows of a stack of blocks.

    Attributes:
        name: by which the stack and its copies are known.
        mode: its memory mode.
        kind: what else decides which tensors the blocks keep.
        owner: the scheduler that plans for it.
        planned: the plan that the scheduler gives it; None: as the mode says.
        recorder: of the step that is being observed, if one is.
    """

    name: str
    recurrence: Recurrence
    mode: str = "auto"
    kind: Hashable = ()
    owner: Scheduler | None = field(default=None, repr=False)
    planned: MemoryPlan | None = None
    recorder: Recorder | None = field(default=None, repr=False)

    def plan_for(self, dtype: torch.dtype, training: bool = True) -> MemoryPlan:
        """The plan for an input of this dtype. γ = 0, during a warm-up say, cannot be reversed."""
        recurrence = self.recurrence if training else self.recurrence.in_evaluation
        if self.planned is not None and not (self.planned.reversed and recurrence.plain):
            return self.planned
        if (dtype, self.mode) not in recurrence.plans:
            mode = "auto" if recurrence.plain and self.mode == "reverse" else self.mode
            recurrence.plans[dtype, self.mode] = leanest(recurrence, dtype, mode)
        plan: MemoryPlan = recurrence.plans[dtype, self.mode]
        return plan

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recorder": None}


@dataclass(frozen=True)
class Budget:
    """How much memory a training step may take at its highest point, above parameters, gradients and batch.

    Attributes:
        amount: bytes as an int, or a fraction of the device's memory as a float.
        given: as the user wrote it.

    >>> parse_memory("8GB")
    ('auto', Budget(amount=8000000000, given='8GB'))
    >>> parse_memory("reverse"), parse_memory(0.5), parse_memory(8e9)[1].amount
    (('reverse', None), ('auto', Budget(amount=0.5, given=0.5)), 8000000000)
    """

    amount: int | float
    given: Any

    def bytes(self, device: torch.device) -> int:
        """The budget on this device."""
        if isinstance(self.amount, int):
            return self.amount
        if device.type == "cpu":
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        else:
            total = torch.get_device_module(device).get_device_properties(device).total_memory
        return int(self.amount * total)


def parse_memory(memory: Any) -> tuple[str, Budget | None]:
    """The mode that `memory=` stands for, and the budget if it is one. A budget goes with mode "auto".

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(memory, str):
        if memory in MODES:
            return memory, None
        try:
            return "auto", Budget(parse_bytes(memory), memory)
        except ValueError:
            pass
    elif (isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0) or (
        isinstance(memory, float) and 0 < memory <= 1
    ):
        return "auto", Budget(memory, memory)
    elif isinstance(memory, float) and memory > 1 and memory.is_integer():
        return "auto", Budget(int(memory), memory)
    raise ValueError(
        f"memory must be one of {', '.join(map(repr, MODES))}, or a budget: bytes as a whole number or as '8GB', or a fraction of "
        f"the device's memory in (0, 1]; got {memory!r}."
    )
