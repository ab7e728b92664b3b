"""A callback for the Trainer of transformers, and for those derived from it, as TRL's.

    Trainer(model, args, train_dataset=data, callbacks=[Reversible(gamma=1/8)])

`rg.convert(model)` before is as good. The callback helps where a script makes the model itself (`model_init`, a model's name given to
SFTTrainer), and where γ is to move. A training that is resumed goes on at the γ of its step.
"""

from __future__ import annotations

from typing import Any

from ..extras import require
from .reversible import Conversion

TrainerCallback: Any = require("transformers").TrainerCallback


class Reversible(Conversion, TrainerCallback):
    """Converts the model and moves γ with the steps of the optimizer. Its arguments are those of `Conversion`."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.convert(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.begin(model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moved()
