"""A Lightning callback.

    trainer = L.Trainer(callbacks=[Reversible(gamma=1/8)])
    trainer = L.Trainer(callbacks=[Reversible(gamma=0.9, schedule={0: 0, 500: 1}, part="net", memory="8GB")])

The model is converted at setup, before a strategy wraps it, for training, validation, test and prediction alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..extras import require
from .reversible import Conversion

Callback: Any = require("lightning").pytorch.callbacks.Callback


class Reversible(Callback):
    """Converts the module, unless it is converted already, and moves γ with its training steps, if there is a schedule.

    Its progress is part of Lightning's checkpoints, and so is γ: in the metadata of their `state_dict`.

    Args:
        gamma: of `convert`.
        schedule: by step, which share of γ the model has then, as for `GammaSchedule`. None: γ stays.
        shape: of the schedule, "linear" or "cosine".
        part: the path in the module of what is to be converted. "": the module.
        options: of `convert`.
    """

    def __init__(
        self, gamma: Any = None, schedule: Mapping[int, float] | None = None, shape: str = "linear", part: str = "", **options: Any
    ) -> None:  # fmt: skip
        self.conversion = Conversion(gamma, schedule, shape, part, **options)
        self.saved: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.conversion.of(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.conversion.begin(pl_module)
        if self.saved is not None and self.conversion.schedule is not None:
            self.conversion.schedule.load_state_dict(self.saved)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.conversion.step()

    def state_dict(self) -> dict[str, Any]:
        schedule = self.conversion.schedule
        return {} if schedule is None else schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict or None
