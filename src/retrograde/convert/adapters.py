"""What is known of the residual blocks of other libraries, by the names of their classes: nothing is imported.

A table lists, by library, classes whose blocks compute x + f(x), each with a function that says of a block whether it keeps the shape
of x. What is left out is found by a trial on an example (`probe`): in timm, blocks with something done between them (convit, twins,
davit), blocks in no container (dla, xception, volo's middle) and blocks with two streams (tnt, crossvit's fusion); in transformers,
stages of several layers, layers that change the shape of x, and blocks with two streams.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..reverse.changes import STATISTICS_ONLY

KEEPS = "keeps the shape of its input"
_NO_SKIP = "has no residual connection"


def _always(block: nn.Module) -> str:
    return KEEPS


def _without(*shortcuts: str) -> Callable[[nn.Module], str]:
    """Blocks that keep the shape unless they have one of these submodules."""

    def verdict(block: nn.Module) -> str:
        present = (name for name in shortcuts if not isinstance(getattr(block, name, None), nn.Identity | None))
        return next((f"changes the shape of its input ({name})" for name in present), KEEPS)

    return verdict


def _with_identity(shortcut: str) -> Callable[[nn.Module], str]:
    """Blocks that have no residual connection if this is None, and change the shape if it is not an identity."""
    return lambda block: _NO_SKIP if getattr(block, shortcut) is None else _without(shortcut)(block)


def _if(flag: str) -> Callable[[nn.Module], str | None]:
    """Blocks that are residual only if this attribute is true; where it is missing, they are others of the same name."""
    said: dict[Any, str] = {True: KEEPS, False: f"{_NO_SKIP} (its shape changes)"}
    return lambda block: said.get(getattr(block, flag, None))


def _unless(flag: str) -> Callable[[nn.Module], str]:
    """Blocks that are residual only if this attribute is false."""
    return lambda block: _NO_SKIP if getattr(block, flag) else KEEPS


_TABLE: dict[str, dict[Callable[[nn.Module], str | None], str]] = {  # in timm a class goes with its module
    "retrograde": {_without("downsample"): "_Block"},
    "torch": {_always: "TransformerEncoderLayer TransformerDecoderLayer"},
    "torchvision": {
        _always: "CNBlock EncoderBlock SwinTransformerBlock SwinTransformerBlockV2",
        _without("downsample"): "BasicBlock Bottleneck",
        _without("proj"): "ResBottleneckBlock",
        _without("project", "pool_skip"): "MultiscaleBlock",
        _if("use_res_connect"): "InvertedResidual MBConv FusedMBConv",
        _if("apply_residual"): "_InvertedResidual",
    },
    "transformers": {_without("shortcut"): "ResNetBasicLayer ResNetBottleNeckLayer RegNetXLayer RegNetYLayer"},
    "timm": {
        _always: """
            beit.Block cait.LayerScaleBlock csatv2.Block csatv2.TransformerBlock cspnet.BottleneckBlock cspnet.DarkBlock
            cspnet.EdgeBlock deepseek_vit.DeepseekVitBlock edgenext.SplitTransposeBlock efficientformer.MetaBlock1d
            efficientformer.MetaBlock2d efficientformer_v2.EfficientFormerV2Block efficientvim.EfficientViMBlock eva.EvaBlock
            eva.EvaBlockPostNorm fasternet.MLPBlock fastvit.RepMixerBlock fastvit.AttentionBlock focalnet.FocalNetBlock
            gcvit.GlobalContextVitBlock inception_next.MetaNeXtBlock inception_resnet_v2.Block35 inception_resnet_v2.Block17
            inception_resnet_v2.Block8 levit.LevitBlock mambaout.GatedConvBlock metaformer.MetaFormerBlock mlp_mixer.MixerBlock
            mlp_mixer.ResBlock mlp_mixer.SpatialGatingBlock mobilevit.LinearTransformerBlock nest.TransformerLayer pvt_v2.Block
            sequencer.Sequencer2dBlock starnet.Block swiftformer.ConvEncoder swin_transformer.SwinTransformerBlock
            swin_transformer_v2.SwinTransformerV2Block swin_transformer_v2_cr.SwinTransformerV2CrBlock visformer.Block
            vision_transformer.Block vision_transformer.ResPostBlock vision_transformer.ParallelScalingBlock
            vision_transformer.DiffParallelScalingBlock vision_transformer.ParallelThingsBlock
            vision_transformer_relpos.RelPosBlock vision_transformer_relpos.ResPostRelPosBlock vision_transformer_sam.Block
            xcit.XCABlock
            """,
        _unless("shortcut_after_dw"): "edgenext.ConvBlock",
        _without("shortcut"): "convnext.ConvNeXtBlock",
        _with_identity("shortcut"): """
            byobnet.BasicBlock byobnet.BottleneckBlock byobnet.DarkBlock byobnet.EdgeBlock byobnet.SelfAttnBlock
            """,
        _with_identity("downsample"): "regnet.Bottleneck regnet.PreBottleneck",
        _without("downsample"): """
            nfnet.NormFreeBlock res2net.Bottle2neck resnest.ResNestBottleneck resnet.BasicBlock resnet.Bottleneck
            resnetv2.Bottleneck resnetv2.PreActBasic resnetv2.PreActBottleneck senet.SEResNetBlock senet.SEBottleneck
            senet.SEResNetBottleneck senet.SEResNeXtBottleneck senet.Bottleneck sknet.SelectiveKernelBasic
            sknet.SelectiveKernelBottleneck tresnet.BasicBlock tresnet.Bottleneck
            """,
    },
}  # fmt: skip
_RULES = {
    (library, name): verdict
    for library, rows in _TABLE.items()
    for verdict, names in rows.items()
    for name in names.split()
}
_LAYERS = ("EncoderLayer", "DecoderLayer", "Block", "SwinLayer", "Swinv2Layer", "ConvNextLayer", "ConvNextV2Layer")
"""Names of layers in transformers from before there was a class of those that can be checkpointed."""
_OTHER_LAYERS = (
    "ConvLayer", "Stage", "MultiScaleBlock", "TwoWayAttentionBlock", "CrossAttentionLayer", "MobileViTLayer", "MobileViTV2Layer",
    "RepVGGBlock", "BridgeBlock", "RecBlock",
)  # fmt: skip


def judge(block: nn.Module) -> str | None:
    """`KEEPS` for a block of x + f(x) with the shape of x; for other blocks of the kind why they are not; None for other modules."""
    owner = next(cls for cls in type(block).__mro__ if "forward" in vars(cls))
    library = owner.__module__.partition(".")[0]
    name = owner.__name__
    if library == "timm":
        _know_statistics()
        module = owner.__module__.rpartition(".")[2]
        if module == "_efficientnet_blocks":
            return _if("has_skip")(block)
        name = f"{module}.{name}"
    if library == "transformers_modules":  # a model's own code on the hub
        library = "transformers"
    verdict = _RULES.get((library, name))
    if verdict is not None:
        return verdict(block)
    if library == "transformers" and not name.endswith(_OTHER_LAYERS):
        layer = any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(block).__mro__)
        return KEEPS if layer or name.endswith(_LAYERS) else None
    return None


def is_chain(module: nn.Module) -> bool:
    """Whether a module that is no container runs its children one after another, as `nn.Sequential` does."""
    return f"{type(module).__module__}.{type(module).__name__}" == "timm.models.regnet.RegStage"


def _know_statistics() -> None:
    """timm's BatchNorm with an activation has a forward of its own."""
    layers = sys.modules.get("timm.layers.norm_act")
    if layers is not None:
        STATISTICS_ONLY.update({layers.BatchNormAct2d.forward, layers.SyncBatchNormAct.forward})
