"""Residual blocks of timm: by module and class, with what tells a block that keeps its shape from one that does not.

Left out, and found by a trial on an example: blocks with something done between them (convit, twins, davit), blocks that live
in no container (dla, xception, volo's middle), and blocks with two streams (tnt, crossvit's fusion).
"""

from __future__ import annotations

import sys

from torch import nn

from ...reverse.parts import STATISTICS_ONLY
from . import KEEPS, with_skip, without

ALWAYS = {
    "beit": "Block",
    "cait": "LayerScaleBlock",
    "csatv2": "Block TransformerBlock",
    "cspnet": "BottleneckBlock DarkBlock EdgeBlock",
    "deepseek_vit": "DeepseekVitBlock",
    "edgenext": "ConvBlock SplitTransposeBlock",
    "efficientformer": "MetaBlock1d MetaBlock2d",
    "efficientformer_v2": "EfficientFormerV2Block",
    "efficientvim": "EfficientViMBlock",
    "eva": "EvaBlock EvaBlockPostNorm",
    "fasternet": "MLPBlock",
    "fastvit": "RepMixerBlock AttentionBlock",
    "focalnet": "FocalNetBlock",
    "gcvit": "GlobalContextVitBlock",
    "inception_next": "MetaNeXtBlock",
    "inception_resnet_v2": "Block35 Block17 Block8",
    "levit": "LevitBlock",
    "mambaout": "GatedConvBlock",
    "metaformer": "MetaFormerBlock",
    "mlp_mixer": "MixerBlock ResBlock SpatialGatingBlock",
    "mobilevit": "LinearTransformerBlock",
    "nest": "TransformerLayer",
    "pvt_v2": "Block",
    "sequencer": "Sequencer2dBlock",
    "starnet": "Block",
    "swiftformer": "ConvEncoder",
    "swin_transformer": "SwinTransformerBlock",
    "swin_transformer_v2": "SwinTransformerV2Block",
    "swin_transformer_v2_cr": "SwinTransformerV2CrBlock",
    "visformer": "Block",
    "vision_transformer": "Block ResPostBlock ParallelScalingBlock DiffParallelScalingBlock ParallelThingsBlock",
    "vision_transformer_relpos": "RelPosBlock ResPostRelPosBlock",
    "vision_transformer_sam": "Block",
    "xcit": "XCABlock",
}
SHORTCUT = {
    "byobnet": ("BasicBlock BottleneckBlock DarkBlock EdgeBlock SelfAttnBlock", "shortcut"),
    "convnext": ("ConvNeXtBlock", "shortcut"),
    "nfnet": ("NormFreeBlock", "downsample"),
    "regnet": ("Bottleneck PreBottleneck", "downsample"),
    "res2net": ("Bottle2neck", "downsample"),
    "resnest": ("ResNestBottleneck", "downsample"),
    "resnet": ("BasicBlock Bottleneck", "downsample"),
    "resnetv2": ("PreActBasic PreActBottleneck Bottleneck", "downsample"),
    "senet": ("SEResNetBlock SEBottleneck SEResNetBottleneck SEResNeXtBottleneck Bottleneck", "downsample"),
    "sknet": ("SelectiveKernelBasic SelectiveKernelBottleneck", "downsample"),
    "tresnet": ("BasicBlock Bottleneck", "downsample"),
}
NONE_IS_NO_SKIP = {"byobnet", "regnet"}  # a shortcut of None there: no residual connection


def judge(block: nn.Module, owner: type) -> str | None:
    module, name = owner.__module__.rpartition(".")[2], owner.__name__
    if name in ALWAYS.get(module, "").split():
        return "has no residual connection" if getattr(block, "shortcut_after_dw", False) else KEEPS
    names, shortcut = SHORTCUT.get(module, ("", ""))
    if name in names.split():
        if module in NONE_IS_NO_SKIP and getattr(block, shortcut) is None:
            return "has no residual connection"
        return without(block, shortcut)
    if module == "_efficientnet_blocks" and hasattr(block, "has_skip"):
        return with_skip(block, "has_skip")
    return None


def _know_statistics() -> None:
    """timm's BatchNorm with an activation has a forward of its own."""
    layers = sys.modules.get("timm.layers.norm_act")
    if layers is not None:
        STATISTICS_ONLY.update({layers.BatchNormAct2d.forward, layers.SyncBatchNormAct.forward})


_know_statistics()
