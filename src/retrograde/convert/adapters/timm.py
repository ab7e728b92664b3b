"""Residual blocks of timm."""

from __future__ import annotations

import sys

from torch import nn

from ...core.parts import STATISTICS_ONLY
from . import KEEPS, with_skip, without

ALWAYS = {
    "Block", "ResPostBlock", "ParallelScalingBlock", "DiffParallelScalingBlock", "ParallelThingsBlock", "ResPostRelPosBlock",
    "RelPosBlock", "LayerScaleBlock", "EvaBlock", "EvaBlockPostNorm", "SwinTransformerBlock", "SwinTransformerV2Block",
    "SwinTransformerV2CrBlock", "MixerBlock", "ResBlock", "SpatialGatingBlock", "MetaFormerBlock", "XCABlock", "ClassAttentionBlock",
}  # fmt: skip
SHORTCUT = {
    "BasicBlock": "downsample", "Bottleneck": "downsample", "PreActBasic": "downsample", "PreActBottleneck": "downsample",
    "PreBottleneck": "downsample", "ConvNeXtBlock": "shortcut",
}  # fmt: skip


def judge(block: nn.Module, name: str) -> str | None:
    if name in SHORTCUT and hasattr(block, SHORTCUT[name]):
        return without(block, SHORTCUT[name])
    if hasattr(block, "has_skip"):
        return with_skip(block, "has_skip")
    return KEEPS if name in ALWAYS and name != "ClassAttentionBlock" else None


def _know_statistics() -> None:
    """timm's BatchNorm with an activation has a forward of its own."""
    layers = sys.modules.get("timm.layers.norm_act")
    if layers is not None:
        STATISTICS_ONLY.update({layers.BatchNormAct2d.forward, layers.SyncBatchNormAct.forward})


_know_statistics()
