"""Residual blocks of torchvision."""

from __future__ import annotations

from torch import nn

from . import KEEPS, with_skip, without

ALWAYS = {"CNBlock", "EncoderBlock", "SwinTransformerBlock", "SwinTransformerBlockV2"}
SHORTCUT = {"BasicBlock": "downsample", "Bottleneck": "downsample", "ResBottleneckBlock": "proj"}
SKIP = {"InvertedResidual", "MBConv", "FusedMBConv"}


def judge(block: nn.Module, name: str) -> str | None:
    if name in ALWAYS:
        return KEEPS
    if name in SHORTCUT:
        return without(block, SHORTCUT[name])
    return with_skip(block, "use_res_connect") if name in SKIP and hasattr(block, "use_res_connect") else None
