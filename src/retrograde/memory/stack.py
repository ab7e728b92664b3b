"""A stack of blocks and its memory plan: what a driver of passes has, and a scheduler plans for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..reverse.recurrence import Recurrence
from .modes import MemoryPlan, leanest

if TYPE_CHECKING:
    from .budget import Recorder, Scheduler


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
