"""Residual blocks of transformers: its layers that can be checkpointed, and those that could before there was such a class.

Left out are stages of several layers, layers that change the shape of their input, and blocks with two streams.
"""

from __future__ import annotations

from torch import nn

from . import KEEPS, without

NOT_RESIDUAL = (
    "ConvLayer", "Stage", "MultiScaleBlock", "TwoWayAttentionBlock", "CrossAttentionLayer", "MobileViTLayer", "MobileViTV2Layer",
    "RepVGGBlock", "BridgeBlock", "RecBlock",
)  # fmt: skip
OLDER = ("EncoderLayer", "DecoderLayer", "Block", "SwinLayer", "Swinv2Layer", "ConvNextLayer", "ConvNextV2Layer")
SHORTCUT = ("ResNetBasicLayer", "ResNetBottleNeckLayer", "RegNetXLayer", "RegNetYLayer")


def judge(block: nn.Module, owner: type) -> str | None:
    name = owner.__name__
    if name in SHORTCUT:
        return without(block, "shortcut")
    layer = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(block).__mro__)
    if not (layer or name.endswith(OLDER)) or name.endswith(NOT_RESIDUAL):
        return None
    return KEEPS
