"""A callback for the Trainer of transformers, and for those derived from it, as TRL's.

    Trainer(model, args, train_dataset=data, callbacks=[Reversible(gamma=1/8)])

`rg.convert(model)` before is as good. The callback helps where a script makes the model itself (`model_init`, a model's name given to
SFTTrainer), and where γ is to move.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..extras import require
from .reversible import Conversion

TrainerCallback: Any = require("transformers").TrainerCallback


class Reversible(TrainerCallback):
    """Converts the model, unless it is converted already, and moves γ with the steps of the optimizer, if there is a schedule.

    A training that is resumed goes on at the γ of its step.

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
        self.conversion = Conversion(gamma, schedule, shape, part, **options)

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.conversion.of(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.conversion.begin(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.conversion.step()
