"""γ in what Accelerate saves.

    model, optimizer = accelerator.prepare(rg.convert(model), optimizer)
    remember(accelerator, model)
    accelerator.save_state("run")

`save_state` writes weights as safetensors, which hold tensors alone, and no γ.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..convert.convert import stages_of


class Remembered:
    """What the stages of a model compute, for a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"stages": [stage.described for stage in stages_of(self.model) if not stage.checkpointed]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here = self.state_dict()
        if here != state:
            warnings.warn(
                f"this checkpoint is of another network: it was saved with {_shown(state)}, and the model has {_shown(here)}. "
                "rg.revert(model), and rg.convert(model, …) with what it was saved with.",
                stacklevel=3,
            )


def remember(accelerator: Any, model: nn.Module) -> None:
    """Save γ and the stages of a model with `accelerator.save_state`, and compare them in `load_state`.

    A `GammaSchedule` moves γ: register it as well, with `accelerator.register_for_checkpointing(schedule)`, and before the model is
    remembered, so that it is loaded first.
    """
    accelerator.register_for_checkpointing(Remembered(model))


def _shown(state: dict[str, Any]) -> str:
    return "; ".join(f"{row['stage']}: gamma = {row['gamma']}" for row in state["stages"]) or "no stages"
