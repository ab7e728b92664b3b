"""Residual blocks of transformers: its layers that can be checkpointed, and those that could before there was such a class."""

from __future__ import annotations

from torch import nn

from . import KEEPS

NOT_RESIDUAL = ("ConvLayer", "Stage", "MultiScaleBlock")
OLDER = ("EncoderLayer", "DecoderLayer", "Block", "SwinLayer", "Swinv2Layer", "ConvNextLayer", "ConvNextV2Layer")


def judge(block: nn.Module, name: str) -> str | None:
    layer = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(block).__mro__)
    if not (layer or name.endswith(OLDER)) or name.endswith(NOT_RESIDUAL):
        return None
    return KEEPS
