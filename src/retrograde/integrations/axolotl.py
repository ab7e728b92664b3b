"""A plugin of Axolotl.

plugins:
  - retrograde.integrations.axolotl.ReversiblePlugin
retrograde_gamma: 0.125
retrograde_memory: auto
gradient_checkpointing: true        # may stay: converted blocks take its place
"""

from __future__ import annotations

from typing import Any

from ..convert import convert
from ..extras import require

require("transformers")  # Axolotl imports it
BasePlugin: Any = require("axolotl.integrations.base").BasePlugin
BaseModel: Any = require("pydantic").BaseModel


class Arguments(BaseModel):
    """What the YAML file may have."""

    retrograde_gamma: float | None = None
    retrograde_memory: str = "auto"


class ReversiblePlugin(BasePlugin):
    """Converts the model when it is loaded, with its adapters."""

    def get_input_args(self) -> str:
        return f"{__name__}.Arguments"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        arguments = Arguments(**{name: cfg[name] for name in Arguments.model_fields if cfg.get(name) is not None})
        convert(model, gamma=arguments.retrograde_gamma, memory=arguments.retrograde_memory)
