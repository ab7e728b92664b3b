"""Architectures of seven ecosystems, small and with random weights, each with a way to call it.

ARCHITECTURES["timm vit"].make() -> a model in training mode
ARCHITECTURES["timm vit"].call(model) -> its output, one tensor
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.extras import require
from retrograde.memory.step import as_call

with warnings.catch_warnings():  # what these packages warn of when imported
    warnings.simplefilter("ignore")
    tv = require("torchvision.models")
    timm = require("timm")
    hf = require("transformers")
    diffusers = require("diffusers")
    monai = require("monai.networks.nets")
    geometric = require("torch_geometric.nn")
hf.logging.set_verbosity_error()


@dataclass(frozen=True)
class Architecture:
    """How to make a model and what to call it with.

    least: the fewest blocks that must be found in it. trial: its classes are not known, so they are found by a trial on the example.
    """

    make: Callable[[], nn.Module]
    example: Any
    least: int
    trial: bool = False

    def call(self, model: nn.Module) -> Tensor:
        args, kwargs = as_call(self.example)
        out = model(*args, **kwargs)
        return out if isinstance(out, Tensor) else out[0]

    def convert(self, model: nn.Module, **options: Any) -> nn.Module:
        return rg.convert(model, self.example if self.trial else None, **options)


ARCHITECTURES: dict[str, Architecture] = {}


def add(name: str, make: Callable[[], nn.Module], example: Any, least: int, trial: bool = False) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = make().train()
        for p in model.parameters():  # heads of zeros and layer scales of 1e-6 would hide what the blocks do
            if p.numel() and p.detach().abs().max() < 1e-3:
                nn.init.normal_(p, std=0.1)
        return model

    ARCHITECTURES[name] = Architecture(made, example, least, trial)


def fixed(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(4))


def image(size: int) -> Tensor:
    return fixed(2, 3, size, size)


# torchvision -----------------------------------------------------------------------------------------------------------

RESNET = tv.resnet.ResNet
for depth, layers in {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}.items():
    add(f"torchvision resnet{depth}", partial(RESNET, tv.resnet.BasicBlock, layers, num_classes=5), image(32), 2)
for name, layers, groups, width in (
    ("resnet50", (3, 4, 6, 3), 1, 4),
    ("resnet101", (3, 4, 23, 3), 1, 4),
    ("resnet152", (3, 8, 36, 3), 1, 4),
    ("resnext50", (3, 4, 6, 3), 2, 2),
    ("wide_resnet50", (3, 4, 6, 3), 1, 8),
):
    sizes: dict[str, Any] = {"num_classes": 5, "groups": groups, "width_per_group": width}
    make = partial(RESNET, tv.resnet.Bottleneck, layers, zero_init_residual=True, **sizes)
    add(f"torchvision {name}", make, image(32), 12)


def torchvision_vit() -> nn.Module:
    return tv.VisionTransformer(32, 8, 4, 2, 32, 64, dropout=0.1, attention_dropout=0.1, num_classes=5)


def torchvision_swin(block: str, merging: str) -> nn.Module:
    swin = tv.swin_transformer
    kinds = {"block": getattr(swin, block), "downsample_layer": getattr(swin, merging)}
    rates = {"dropout": 0.1, "stochastic_depth_prob": 0.2}
    return swin.SwinTransformer([4, 4], 16, [4, 2], [2, 2], [4, 4], num_classes=5, **kinds, **rates)


CN = tv.convnext.CNBlockConfig
REGNET = tv.regnet.BlockParams([3, 3], [16, 32], [8, 8], [1.0, 1.0], [2, 2])
for name, make, least in (
    ("convnext", lambda: tv.convnext.ConvNeXt([CN(16, 32, 3), CN(32, None, 3)], 0.2, 1.0, num_classes=5), 6),
    ("vit", torchvision_vit, 4),
    ("swin", partial(torchvision_swin, "SwinTransformerBlock", "PatchMerging"), 6),
    ("swin v2", partial(torchvision_swin, "SwinTransformerBlockV2", "PatchMergingV2"), 6),
    ("mobilenet v2", partial(tv.MobileNetV2, num_classes=5, width_mult=0.25), 8),
    ("mobilenet v3", partial(tv.mobilenet_v3_large, num_classes=5, reduced_tail=True), 6),
    ("mnasnet", partial(tv.MNASNet, 0.25, num_classes=5), 6),
    ("efficientnet b0", partial(tv.efficientnet_b0, num_classes=5), 6),
    ("regnet", partial(tv.RegNet, REGNET, num_classes=5), 4),
):
    add(f"torchvision {name}", make, image(32), least)

# timm ------------------------------------------------------------------------------------------------------------------

NARROW: dict[str, Any] = {"layers": (3, 3, 1, 1), "channels": (8, 16, 16, 16)}
VIT: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 4, "num_heads": 2}
SWIN: dict[str, Any] = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (4, 2), "num_heads": (2, 2)}
DROP: dict[str, Any] = {"drop_path_rate": 0.2}
RATES: dict[str, Any] = {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1, **DROP}
for name, least, options in (
    ("resnet26", 4, NARROW),
    ("resnetv2_50", 4, {"layers": (3, 3), "channels": (32, 64), "stem_chs": 16}),
    ("res2net50d", 4, NARROW),
    ("resnest50d", 4, NARROW),
    ("skresnet50", 4, NARROW),
    ("regnety_002", 8, {}),
    ("vit_tiny_patch16_224", 4, {**VIT, **RATES, "init_values": 0.1}),
    ("deit_tiny_distilled_patch16_224", 4, {**VIT, "proj_drop_rate": 0.1}),
    ("beit_base_patch16_224", 4, {**VIT, **DROP}),
    ("eva02_tiny_patch14_224", 4, {**VIT, **DROP, "img_size": 28}),
    ("cait_xxs24_224", 4, {**VIT, **DROP}),
    ("xcit_nano_12_p16_224", 4, VIT),
    ("vit_relpos_small_patch16_224", 4, VIT),
    ("convnext_atto", 6, {"depths": (3, 3, 1, 1), "dims": (8, 16, 16, 16), **DROP}),
    ("swin_tiny_patch4_window7_224", 6, {**SWIN, **DROP}),
    ("swinv2_tiny_window8_256", 6, SWIN),
):
    label = name.split("_patch")[0].removesuffix("_224")
    make = partial(timm.create_model, name, num_classes=5, **options)
    add(f"timm {label}", make, image(options.get("img_size", 32)), least)
models = timm.models
MIXER = partial(models.mlp_mixer.MlpMixer, 5, img_size=32, patch_size=8, num_blocks=4, embed_dim=24, **DROP)
GMLP: dict[str, Any] = {"block_layer": models.mlp_mixer.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp}
FOCAL: dict[str, Any] = {"embed_dim": 16, "focal_levels": (2, 2), "focal_windows": (3, 3)}
for name, make, least in (
    ("mixer", MIXER, 4),
    ("gmlp", partial(MIXER, **GMLP, mlp_ratio=4), 4),
    ("resmlp", partial(MIXER, block_layer=models.mlp_mixer.ResBlock, mlp_ratio=4), 4),
    ("poolformer", partial(models.metaformer.MetaFormer, num_classes=5, depths=(3, 3), dims=(16, 32), **DROP), 6),
    ("focalnet", partial(models.focalnet.FocalNet, num_classes=5, depths=(3, 3), **FOCAL, **DROP), 6),
    ("mambaout_femto", partial(timm.create_model, "mambaout_femto", num_classes=5, depths=(3, 3), dims=(16, 32)), 6),
    ("mobilenetv3_small_100", partial(timm.create_model, "mobilenetv3_small_100", num_classes=5), 3),
    ("pvt_v2_b0", partial(timm.create_model, "pvt_v2_b0", num_classes=5), 8),
):
    add(f"timm {name}", make, image(32), least)

# transformers ----------------------------------------------------------------------------------------------------------
# Options that a config does not know are kept and do nothing, so families share them.

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    **SMALL, "max_position_embeddings": 40, "max_2d_position_embeddings": 40, "embedding_size": 32, "cls_token_id": 1,
    "sep_token_id": 2, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "attention_dropout": 0.1,
    "mlp_dropout": 0.1, "hidden_dim": 48, "relative_attention": True, "pos_att_type": "c2p|p2c",
    "global_attn_every_n_layers": 2, "local_attention": 8,
}  # fmt: skip
OWN_NAMES: dict[str, Any] = {
    "max_position_embeddings": 40, "rotary_dim": 4, "ffn_dim": 48, "word_embed_proj_dim": 32, "hidden_dropout": 0.1, "resid_pdrop": 0.1,
    "embed_dropout": 0.1, "resid_dropout": 0.1, "attention_dropout": 0.1, "window_size": 8,
}  # fmt: skip
GPT_NEO: dict[str, Any] = {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.1}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT_ATTENTION: dict[str, Any] = {
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
}  # fmt: skip
DROPPING: dict[str, Any] = {**VISION, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
WINDOWS: dict[str, Any] = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [4, 2], "num_heads": [2, 2], "window_size": 4,
}  # fmt: skip
SPEECH: dict[str, Any] = {
    **SMALL, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
SEQ: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "max_position_embeddings": 40, "dropout": 0.1, "attention_dropout": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
MEL: dict[str, Any] = {**SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.1,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
TOKENS = {"input_ids": ids(2, 10), "attention_mask": torch.arange(10)[None] < torch.tensor([[10], [7]])}
NO_CACHE = {"input_ids": ids(2, 10), "use_cache": False}
PAIR = {**TOKENS, "decoder_input_ids": ids(2, 6), "use_cache": False}
PIXELS = {"pixel_values": fixed(2, 3, 32, 32)}
SOUND = {"input_values": fixed(2, 800)}
SPECTRUM = {"input_features": fixed(2, 8, 40), "decoder_input_ids": ids(2, 6)}

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)  # of transformers' own making
    hf.DebertaModel, hf.DebertaV2Model  # noqa: B018 - imported on first use


def hf_models(families: str, kind: str, inputs: dict[str, Any], least: int = 4, **options: Any) -> None:
    """Some families with the same options."""

    def make(family: str) -> nn.Module:
        model: nn.Module = getattr(hf, f"{family}{kind}")(getattr(hf, f"{family}Config")(**options))
        return model

    for family in families.split():
        add(f"transformers {family}", partial(make, family), inputs, least)


def gemma3() -> nn.Module:
    layers = ["sliding_attention", "full_attention"] * 2
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL, **GROUPED, sliding_window=6, layer_types=layers))


hf_models("Bert Roberta Electra RoFormer Deberta DebertaV2 DistilBert ModernBert", "Model", TOKENS, **ENCODER)
hf_models("GPT2", "LMHeadModel", TOKENS, **SMALL, **OWN_NAMES)
hf_models("GPTNeo", "ForCausalLM", TOKENS, **SMALL, **OWN_NAMES, **GPT_NEO)
hf_models("GPTNeoX GPTJ OPT Bloom Falcon", "ForCausalLM", TOKENS, **SMALL, **OWN_NAMES)
hf_models("Llama Mistral Qwen2 Qwen3 Gemma2 Olmo2 SmolLM3", "ForCausalLM", TOKENS, **SMALL, **GROUPED)
add("transformers Gemma3", gemma3, TOKENS, 4)
hf_models("Phi", "ForCausalLM", TOKENS, **SMALL, resid_pdrop=0.1)
hf_models("Phi3", "ForCausalLM", TOKENS, **SMALL, **GROUPED)
hf_models("Mixtral", "ForCausalLM", TOKENS, **SMALL, **GROUPED, num_local_experts=4)
hf_models("ViT DeiT Beit", "Model", PIXELS, **DROPPING)
hf_models("Dinov2", "Model", PIXELS, **DROPPING, drop_path_rate=0.2)
hf_models("DINOv3ViT", "Model", PIXELS, **VISION, drop_path_rate=0.2)
hf_models("SiglipVision CLIPVision", "Model", PIXELS, **VISION, attention_dropout=0.1)
TWO: dict[str, Any] = {
    "text_config": {**SMALL, "num_hidden_layers": 3, "max_position_embeddings": 40},
    "vision_config": VISION,
}
hf_models("CLIP", "Model", {**PIXELS, **TOKENS}, 7, projection_dim=16, **TWO)
hf_models("Swin", "Model", PIXELS, 6, **WINDOWS, hidden_dropout_prob=0.1)
hf_models("ConvNext", "Model", PIXELS, 5, hidden_sizes=[16, 32], depths=[3, 3], num_stages=2, drop_path_rate=0.2)
hf_models("ResNet", "Model", PIXELS, 4, embedding_size=16, hidden_sizes=[32, 64], depths=[3, 3])
hf_models("Wav2Vec2 Hubert", "Model", SOUND, **SPEECH)
hf_models("Bart Pegasus", "Model", PAIR, 6, **SEQ)
hf_models("Whisper", "Model", SPECTRUM, 6, **MEL)
hf_models("T5", "Model", PAIR, 6, **T5)
hf_models(
    "Ernie LayoutLM Nystromformer MegatronBert Esm ConvBert RemBert RobertaPreLayerNorm", "Model", TOKENS, **ENCODER
)
hf_models("MobileBert", "Model", TOKENS, **{**ENCODER, "embedding_size": 128})
hf_models("Gemma Olmo Starcoder2 StableLm Cohere Granite Helium Glm", "ForCausalLM", TOKENS, **SMALL, **GROUPED)
hf_models("Nemotron Persimmon Exaone4 Lfm2 GPTBigCode", "ForCausalLM", TOKENS, **SMALL, **GROUPED)
hf_models("Mpt BitNet BioGpt Apertus MiniMax", "ForCausalLM", TOKENS, **SMALL, **GROUPED)
hf_models(
    "Qwen2Moe Qwen3Moe Olmoe GraniteMoe GptOss Phimoe JetMoe", "ForCausalLM", TOKENS, **SMALL, **GROUPED, **EXPERTS
)
hf_models("DeepseekV3", "ForCausalLM", TOKENS, **SMALL, **EXPERTS, **LATENT_ATTENTION)
hf_models("Mamba FalconMamba Rwkv", "ForCausalLM", NO_CACHE, **SMALL, state_size=4, attention_hidden_size=32)
MAMBA2 = {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
hf_models("Mamba2", "ForCausalLM", NO_CACHE, **SMALL, **MAMBA2)
hf_models("ViTMSN IJepa Dinov2WithRegisters BlipVision Aimv2Vision InternVLVision VitDet", "Model", PIXELS, **VISION)
SAM: dict[str, Any] = {"output_channels": 16, "window_size": 2, "global_attn_indexes": [3], "mlp_dim": 48}
hf_models("SamVision", "Model", PIXELS, **VISION, **SAM)
hf_models("Swinv2", "Model", PIXELS, 6, **WINDOWS)
hf_models("CLIPText", "Model", TOKENS, **SMALL, max_position_embeddings=40)
hf_models("WavLM Wav2Vec2Conformer SEW", "Model", SOUND, **SPEECH)
hf_models("MBart Blenderbot M2M100", "Model", PAIR, 6, **SEQ)
hf_models("UMT5 LongT5", "Model", PAIR, 6, **T5)

# PyTorch itself --------------------------------------------------------------------------------------------------------


def torch_encoder(layers: int = 4, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, **options)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(16), enable_nested_tensor=False)


def torch_decoder(**options: Any) -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, 0.1, **options), 4)


def torch_transformer(first: bool) -> nn.Transformer:
    return nn.Transformer(
        16, 2, num_decoder_layers=3, dim_feedforward=32, norm_first=first, batch_first=True,
        custom_encoder=torch_encoder(3, norm_first=first, batch_first=True),
    )  # fmt: skip


AHEAD = nn.Transformer.generate_square_subsequent_mask(5)
PADDED = torch.zeros(2, 5).masked_fill(torch.arange(5) > 3, -torch.inf)
for first in (False, True):
    norm = "pre" if first else "post"
    for batched in (False, True):
        source, target = (fixed(2, n, 16) if batched else fixed(n, 2, 16) for n in (5, 4))
        way: dict[str, Any] = {"norm_first": first, "batch_first": batched}
        masks = {"mask": AHEAD, "src_key_padding_mask": PADDED, "is_causal": True}
        label = f"{norm}-norm {'batch' if batched else 'time'} first"
        add(f"torch encoder, {label}", partial(torch_encoder, **way), {"src": source, **masks}, 4)
        attended = {"tgt": target, "memory": source, "memory_key_padding_mask": PADDED}
        add(f"torch decoder, {label}", partial(torch_decoder, **way), attended, 4)
    both = {"src": fixed(2, 5, 16), "tgt": fixed(2, 4, 16)}
    padded = {"src_key_padding_mask": PADDED, "memory_key_padding_mask": PADDED}
    add(f"torch transformer, {norm}-norm", partial(torch_transformer, first), both | padded, 6)

# by a trial: diffusers, MONAI, PyTorch Geometric -----------------------------------------------------------------------

TIMES: dict[str, Any] = {"timestep": torch.tensor([1, 2]), "return_dict": False}
PATCHED: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 4, "norm_num_groups": 4,
    "sample_size": 8, "patch_size": 2, "dropout": 0.1,
}  # fmt: skip
CAPTIONS: dict[str, Any] = {"cross_attention_dim": 16, "caption_channels": 12, "use_additional_conditions": False}
SIZES: dict[str, Any] = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
U_NET: dict[str, Any] = {
    "sample_size": 16, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4, "dropout": 0.1,
}  # fmt: skip
ATTENDING: dict[str, Any] = {
    "layers_per_block": 3, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
STABLE: dict[str, Any] = {
    "layers_per_block": 2, "cross_attention_dim": 12, "transformer_layers_per_block": 3,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
THREE: dict[str, Any] = {"spatial_dims": 3, "init_filters": 8, "out_channels": 2}


def rearranged(x: Tensor, pattern: str) -> Tensor:
    """`einops.rearrange` where nothing but the order of dimensions changes; all that SwinUNETR asks of it."""
    before, after = (side.split() for side in pattern.split("->"))
    return x.permute([before.index(name) for name in after])


def swin_unetr() -> nn.Module:
    require("monai.networks.nets.swin_unetr").rearrange = rearranged
    return monai.SwinUNETR(
        1, 2, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), feature_size=12, window_size=2, spatial_dims=2
    )  # type: ignore[no-any-return]


class DeepGCN(nn.Module):
    """Layers of DeeperGCN, which normalise before they convolve."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(4):
            convolution = geometric.GENConv(8, 8, norm="layer")
            self.layers.append(geometric.DeepGCNLayer(convolution, nn.LayerNorm(8), nn.ReLU(), block, dropout=0.1))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


LATENT: dict[str, Any] = {"hidden_states": fixed(2, 4, 8, 8), **TIMES}
CAPTION: dict[str, Any] = {"encoder_hidden_states": fixed(2, 5, 12)}
LABELLED: dict[str, Any] = {**LATENT, "class_labels": torch.tensor([1, 2])}
CONDITIONED: dict[str, Any] = {"sample": fixed(2, 4, 16, 16), **CAPTION, **TIMES}
VOLUME = fixed(1, 1, 8, 8, 8)
EDGES = torch.randint(0, 12, (2, 40), generator=torch.Generator().manual_seed(5))
for name, make, example, least in (
    ("diffusers DiT", partial(diffusers.DiTTransformer2DModel, **PATCHED, num_embeds_ada_norm=10), LABELLED, 4),
    ("diffusers PixArt", partial(diffusers.PixArtTransformer2DModel, **PATCHED, **CAPTIONS), {**LATENT, **CAPTION, **SIZES}, 4),
    ("diffusers U-Net", partial(diffusers.UNet2DModel, **U_NET, **ATTENDING), {"sample": fixed(2, 3, 16, 16), **TIMES}, 11),
    ("diffusers Stable Diffusion's U-Net", partial(diffusers.UNet2DConditionModel, **U_NET, **STABLE), CONDITIONED, 16),
    ("monai SegResNet", partial(monai.SegResNet, **THREE, blocks_down=(2, 3), blocks_up=(2,), dropout_prob=0.1), VOLUME, 7),
    ("monai SegResNetDS", partial(monai.SegResNetDS, **THREE, blocks_down=(3, 3)), VOLUME, 6),
    ("monai SwinUNETR", swin_unetr, fixed(1, 1, 64, 64), 8),
    ("geometric DeepGCN res+", partial(DeepGCN, "res+"), (fixed(12, 8), EDGES), 4),
    ("geometric DeepGCN res", partial(DeepGCN, "res"), (fixed(12, 8), EDGES), 4),
):  # fmt: skip
    add(name, make, example, least, trial=True)
