"""An activation checkpointing policy of torchtitan.

    Trainer.Config(..., activation_checkpoint=ReversibleAC.Config(gamma=1/8))

The blocks are converted where torchtitan would wrap them for checkpointing: after tensor parallelism, before FSDP and compile, which
compiles what the blocks run in their steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..convert import convert
from ..extras import require

ActivationCheckpointing: Any = require("torchtitan.distributed.activation_checkpoint").ActivationCheckpointing


class ReversibleAC(ActivationCheckpointing):
    """Runs the blocks of a model as a momentum network, whose activations are recalled and not stored."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        gamma: float = 1 / 8
        """γ in (0, 1]. 1/8 changes a trained network little; 0.9 is for networks trained from scratch."""

        memory: str = "auto"
        """What is kept until backward: "auto", "reverse", "checkpoint", "store", or a budget as "60GB"."""

        stages: str = "layers.*"
        """The blocks: a path, or a pattern."""

    def apply(self, model: nn.Module) -> None:
        config: Any = self.config
        convert(model, gamma=config.gamma, memory=config.memory, stages=[config.stages])
