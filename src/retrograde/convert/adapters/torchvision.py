"""Residual blocks of torchvision."""

from __future__ import annotations

from torch import nn

from . import KEEPS, with_skip, without

ALWAYS = {"CNBlock", "EncoderBlock", "SwinTransformerBlock", "SwinTransformerBlockV2"}
SHORTCUT = {"BasicBlock": "downsample", "Bottleneck": "downsample", "ResBottleneckBlock": "proj"}
SKIP = {
    "InvertedResidual": "use_res_connect",
    "MBConv": "use_res_connect",
    "FusedMBConv": "use_res_connect",
    "_InvertedResidual": "apply_residual",
}


def judge(block: nn.Module, owner: type) -> str | None:
    name = owner.__name__
    if name in ALWAYS:
        return KEEPS
    if name in SHORTCUT:
        return without(block, SHORTCUT[name])
    if name == "MultiscaleBlock":  # of MViT: pools or projects x where its shape changes
        return without(block, "pool_skip") if block.project is None else without(block, "project")
    return with_skip(block, SKIP[name]) if hasattr(block, SKIP.get(name, " ")) else None
