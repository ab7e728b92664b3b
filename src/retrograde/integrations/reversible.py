"""What the callbacks do: convert a model when a trainer has it, and move γ with its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..convert import GammaSchedule, convert
from ..convert.convert import stages_of


class Conversion:
    """The base of the callbacks: converts the model, unless it is converted already, and moves γ, if there is a schedule.

    Args:
        gamma: of `convert`.
        schedule: by step, which share of γ the model has then, as for `GammaSchedule`. None: γ stays.
        shape: of the schedule, "linear" or "cosine".
        part: the path in the model of what is to be converted. "": the model.
        options: of `convert`.
    """

    def __init__(
        self, gamma: Any = None, schedule: Mapping[int, float] | None = None, shape: str = "linear", part: str = "", **options: Any
    ) -> None:  # fmt: skip
        self.points, self.shape, self.part = schedule, shape, part
        self.options = {"gamma": gamma, **options}
        self.schedule: GammaSchedule | None = None

    def convert(self, model: nn.Module) -> None:
        """Convert the model, unless it has been converted."""
        part = model.get_submodule(self.part)
        if not stages_of(part):
            convert(part, **self.options)

    def begin(self, model: nn.Module, steps: int = 0) -> None:
        """Training begins, or goes on after some steps."""
        self.convert(model)
        if self.points is not None:
            self.schedule = GammaSchedule(model.get_submodule(self.part), self.points, shape=self.shape)
            for _ in range(steps):
                self.schedule.step()

    def moved(self) -> None:
        """A step of the optimizer was taken."""
        if self.schedule is not None:
            self.schedule.step()
