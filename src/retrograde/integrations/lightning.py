"""A Lightning callback.

    trainer = L.Trainer(callbacks=[Reversible(gamma=1/8)])
    trainer = L.Trainer(callbacks=[Reversible(gamma=0.9, schedule={0: 0, 500: 1}, part="net", memory="8GB")])

The module is converted at setup, before a strategy wraps it, for training, validation, test and prediction alike. The progress of a
schedule is part of Lightning's checkpoints, and so is γ: in the metadata of their `state_dict`.
"""

from __future__ import annotations

from typing import Any

from ..convert.block import place_of
from ..extras import require
from ..nets.saved import KEY, read
from .reversible import Conversion

Callback: Any = require("lightning").pytorch.callbacks.Callback


class Reversible(Conversion, Callback):
    """Converts the module and moves γ with its training steps. Its arguments are those of `Conversion`."""

    saved: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.convert(pl_module)
        if self.points is not None:
            pl_module.register_load_state_dict_pre_hook(_as_saved)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(pl_module)
        if self.saved is not None and self.schedule is not None:
            self.schedule.load_state_dict(self.saved)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.moved()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.schedule is None else self.schedule.state_dict()

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
