"""A Lightning callback.

    trainer = L.Trainer(callbacks=[Reversible(gamma=1/8)])
    trainer = L.Trainer(callbacks=[Reversible(gamma=0.9, schedule={0: 0, 500: 1}, part="net", memory="8GB")])

The model is converted at setup, before a strategy wraps it, for training, validation, test and prediction alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..convert.block import place_of
from ..extras import require
from ..nets.saved import KEY, read
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
        if self.conversion.points is not None:
            pl_module.register_load_state_dict_pre_hook(_as_saved)

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


def _as_saved(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    """Set γ to that of the weights that are loaded: where it moves, it is not what the model was converted with."""
    metadata = getattr(state_dict, "_metadata", {})
    for path, block in module.named_modules():
        place = place_of(block)
        described = metadata.get(prefix + path, {}).get(KEY)
        if place is not None and described is not None:
            place.stage.gamma = read(described["gamma"])
