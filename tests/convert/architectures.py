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
for name, layers, options in (
    ("resnet50", (3, 4, 6, 3), {"width_per_group": 4}),
    ("resnet101", (3, 4, 23, 3), {"width_per_group": 4}),
    ("resnet152", (3, 8, 36, 3), {"width_per_group": 4}),
    ("resnext50", (3, 4, 6, 3), {"groups": 2, "width_per_group": 2}),
    ("wide_resnet50", (3, 4, 6, 3), {"width_per_group": 8}),
):
    add(
        f"torchvision {name}",
        partial(RESNET, tv.resnet.Bottleneck, layers, num_classes=5, zero_init_residual=True, **options),
        image(32),
        12,
    )
CN = tv.convnext.CNBlockConfig
add(
    "torchvision convnext",
    lambda: tv.convnext.ConvNeXt([CN(16, 32, 3), CN(32, None, 3)], 0.2, 1.0, num_classes=5),
    image(32),
    6,
)
add(
    "torchvision vit",
    lambda: tv.VisionTransformer(32, 8, 4, 2, 32, 64, dropout=0.1, attention_dropout=0.1, num_classes=5),
    image(32),
    4,
)
for name, block in (("swin", "SwinTransformerBlock"), ("swin v2", "SwinTransformerBlockV2")):
    merging = "PatchMerging" if name == "swin" else "PatchMergingV2"
    add(
        f"torchvision {name}",
        partial(
            tv.swin_transformer.SwinTransformer,
            [4, 4],
            16,
            [4, 2],
            [2, 2],
            [4, 4],
            dropout=0.1,
            stochastic_depth_prob=0.2,
            num_classes=5,
            block=getattr(tv.swin_transformer, block),
            downsample_layer=getattr(tv.swin_transformer, merging),
        ),
        image(32),
        6,
    )
add("torchvision mobilenet v2", lambda: tv.MobileNetV2(num_classes=5, width_mult=0.25), image(32), 8)
add("torchvision mobilenet v3", lambda: tv.mobilenet_v3_large(num_classes=5, reduced_tail=True), image(32), 6)
add("torchvision mnasnet", lambda: tv.MNASNet(0.25, num_classes=5), image(32), 6)
add("torchvision efficientnet b0", lambda: tv.efficientnet_b0(num_classes=5), image(32), 6)
add(
    "torchvision regnet",
    lambda: tv.RegNet(tv.regnet.BlockParams([3, 3], [16, 32], [8, 8], [1.0, 1.0], [2, 2]), num_classes=5),
    image(32),
    4,
)

# timm ------------------------------------------------------------------------------------------------------------------


def timm_model(name: str, size: int, least: int, **options: Any) -> None:
    label = name.split("_patch")[0].removesuffix("_224")
    add(f"timm {label}", lambda: timm.create_model(name, num_classes=5, **options), image(size), least)


VIT: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 4, "num_heads": 2}
NARROW: dict[str, Any] = {"layers": (3, 3, 1, 1), "channels": (8, 16, 16, 16)}
timm_model("resnet26", 32, 4, **NARROW)
timm_model("resnetv2_50", 32, 4, layers=(3, 3), channels=(32, 64), stem_chs=16)
timm_model("res2net50d", 32, 4, **NARROW)
timm_model("resnest50d", 32, 4, **NARROW)
timm_model("skresnet50", 32, 4, **NARROW)
timm_model("regnety_002", 32, 8)
timm_model(
    "vit_tiny_patch16_224", 32, 4, **VIT, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.2, init_values=0.1
)
timm_model("deit_tiny_distilled_patch16_224", 32, 4, **VIT, proj_drop_rate=0.1)
timm_model("beit_base_patch16_224", 32, 4, **VIT, drop_path_rate=0.2)
timm_model("eva02_tiny_patch14_224", 28, 4, **{**VIT, "img_size": 28}, drop_path_rate=0.2)
timm_model("cait_xxs24_224", 32, 4, **VIT, drop_path_rate=0.2)
timm_model("xcit_nano_12_p16_224", 32, 4, **VIT)
timm_model("vit_relpos_small_patch16_224", 32, 4, **VIT)
timm_model("convnext_atto", 32, 6, depths=(3, 3, 1, 1), dims=(8, 16, 16, 16), drop_path_rate=0.2)
timm_model(
    "swin_tiny_patch4_window7_224", 32, 6,
    img_size=32, window_size=4, embed_dim=16, depths=(4, 2), num_heads=(2, 2), drop_path_rate=0.2,
)  # fmt: skip
timm_model("swinv2_tiny_window8_256", 32, 6, img_size=32, window_size=4, embed_dim=16, depths=(4, 2), num_heads=(2, 2))
MIXER: dict[str, Any] = {"img_size": 32, "patch_size": 8, "num_blocks": 4, "embed_dim": 24, "drop_path_rate": 0.2}
for name, options in {
    "mixer": {},
    "gmlp": {
        "block_layer": timm.models.mlp_mixer.SpatialGatingBlock,
        "mlp_layer": timm.layers.GatedMlp,
        "mlp_ratio": 4,
    },
    "resmlp": {"block_layer": timm.models.mlp_mixer.ResBlock, "mlp_ratio": 4},
}.items():
    add(f"timm {name}", partial(timm.models.mlp_mixer.MlpMixer, 5, **MIXER, **options), image(32), 4)
add(
    "timm poolformer",
    lambda: timm.models.metaformer.MetaFormer(num_classes=5, depths=(3, 3), dims=(16, 32), drop_path_rate=0.2),
    image(32),
    6,
)
add(
    "timm focalnet",
    lambda: timm.models.focalnet.FocalNet(
        num_classes=5, depths=(3, 3), embed_dim=16, focal_levels=(2, 2), focal_windows=(3, 3), drop_path_rate=0.2
    ),
    image(32),
    6,
)
timm_model("mambaout_femto", 32, 6, depths=(3, 3), dims=(16, 32))
timm_model("mobilenetv3_small_100", 32, 3)
timm_model("pvt_v2_b0", 32, 8)

# transformers ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.1}
DROPPING: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
LOCAL = ["sliding_attention", "full_attention"] * 2
TOKENS = {"input_ids": ids(2, 10), "attention_mask": torch.arange(10)[None] < torch.tensor([[10], [7]])}
PAIR = {**TOKENS, "decoder_input_ids": ids(2, 6), "use_cache": False}


def hf_model(family: str, kind: str, inputs: dict[str, Any], least: int = 4, **options: Any) -> None:
    def make() -> nn.Module:
        config = getattr(hf, f"{family}Config")(**options)
        model: nn.Module = getattr(hf, f"{family}{kind}")(config)
        return model

    add(f"transformers {family}", make, inputs, least)


for family in ("Bert", "Roberta", "Electra", "RoFormer"):
    hf_model(family, "Model", TOKENS, **SMALL, **DROPPING, max_position_embeddings=40, embedding_size=32)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)  # of transformers' own making
    hf.DebertaModel, hf.DebertaV2Model  # noqa: B018 - imported on first use
hf_model(
    "Deberta",
    "Model",
    TOKENS,
    **SMALL,
    **DROPPING,
    max_position_embeddings=40,
    relative_attention=True,
    pos_att_type="c2p|p2c",
)
hf_model(
    "DebertaV2",
    "Model",
    TOKENS,
    **SMALL,
    **DROPPING,
    max_position_embeddings=40,
    relative_attention=True,
    pos_att_type="c2p|p2c",
)
hf_model("DistilBert", "Model", TOKENS, vocab_size=64, dim=32, hidden_dim=48, n_layers=4, n_heads=4, pad_token_id=0)
hf_model(
    "ModernBert",
    "Model",
    TOKENS,
    **SMALL,
    attention_dropout=0.1,
    mlp_dropout=0.1,
    global_attn_every_n_layers=2,
    local_attention=8,
    cls_token_id=1,
    sep_token_id=2,
)
hf_model(
    "GPT2",
    "LMHeadModel",
    TOKENS,
    vocab_size=64,
    n_embd=32,
    n_layer=4,
    n_head=4,
    n_positions=40,
    bos_token_id=1,
    eos_token_id=2,
)
hf_model(
    "GPTNeo",
    "ForCausalLM",
    TOKENS,
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    attention_types=[[["global", "local"], 2]],
    max_position_embeddings=40,
    window_size=8,
    embed_dropout=0.1,
    attention_dropout=0.1,
    resid_dropout=0.1,
    bos_token_id=1,
    eos_token_id=2,
)
hf_model(
    "GPTNeoX", "ForCausalLM", TOKENS, **SMALL, hidden_dropout=0.1, attention_dropout=0.1, max_position_embeddings=40
)
hf_model(
    "GPTJ",
    "ForCausalLM",
    TOKENS,
    vocab_size=64,
    n_embd=32,
    n_layer=4,
    n_head=4,
    rotary_dim=4,
    n_positions=40,
    resid_pdrop=0.1,
    bos_token_id=1,
    eos_token_id=2,
)
hf_model(
    "OPT",
    "ForCausalLM",
    TOKENS,
    vocab_size=64,
    hidden_size=32,
    ffn_dim=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=40,
    word_embed_proj_dim=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
hf_model(
    "Bloom",
    "ForCausalLM",
    TOKENS,
    vocab_size=64,
    hidden_size=32,
    n_layer=4,
    n_head=4,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
hf_model(
    "Falcon",
    "ForCausalLM",
    TOKENS,
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    bos_token_id=1,
    eos_token_id=2,
)
for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Olmo2", "SmolLM3"):
    hf_model(family, "ForCausalLM", TOKENS, **SMALL, **GROUPED)
add(
    "transformers Gemma3",
    lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL, **GROUPED, sliding_window=6, layer_types=LOCAL)),
    TOKENS,
    4,
)
hf_model("Phi", "ForCausalLM", TOKENS, **SMALL, resid_pdrop=0.1)
hf_model("Phi3", "ForCausalLM", TOKENS, **SMALL, **GROUPED)
hf_model("Mixtral", "ForCausalLM", TOKENS, **SMALL, **GROUPED, num_local_experts=4)
PIXELS = {"pixel_values": fixed(2, 3, 32, 32)}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
for family in ("ViT", "DeiT", "Beit"):
    hf_model(family, "Model", PIXELS, **VISION, **DROPPING)
hf_model("Dinov2", "Model", PIXELS, **VISION, **DROPPING, drop_path_rate=0.2)
hf_model("DINOv3ViT", "Model", PIXELS, **VISION, drop_path_rate=0.2)
hf_model("SiglipVision", "Model", PIXELS, **VISION, attention_dropout=0.1)
hf_model("CLIPVision", "Model", PIXELS, **VISION, attention_dropout=0.1)
hf_model(
    "CLIP",
    "Model",
    {**PIXELS, **TOKENS},
    7,
    projection_dim=16,
    text_config={**SMALL, "num_hidden_layers": 3, "max_position_embeddings": 40},
    vision_config=VISION,
)
hf_model(
    "Swin",
    "Model",
    PIXELS,
    6,
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[4, 2],
    num_heads=[2, 2],
    window_size=4,
    hidden_dropout_prob=0.1,
)
hf_model("ConvNext", "Model", PIXELS, 5, hidden_sizes=[16, 32], depths=[3, 3], num_stages=2, drop_path_rate=0.2)
hf_model("ResNet", "Model", PIXELS, 4, embedding_size=16, hidden_sizes=[32, 64], depths=[3, 3])
SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
for family in ("Wav2Vec2", "Hubert"):
    hf_model(family, "Model", {"input_values": fixed(2, 800)}, **SPEECH)
SEQ: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
for family in ("Bart", "Pegasus"):
    hf_model(family, "Model", PAIR, 6, **SEQ)
hf_model(
    "Whisper",
    "Model",
    {"input_features": fixed(2, 8, 40), "decoder_input_ids": ids(2, 6)},
    6,
    **SEQ,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=20,
)
hf_model(
    "T5",
    "Model",
    PAIR,
    6,
    vocab_size=64,
    d_model=32,
    d_ff=48,
    d_kv=8,
    num_layers=3,
    num_heads=4,
    dropout_rate=0.1,
    pad_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=0,
)

for family in (
    "Ernie",
    "LayoutLM",
    "Nystromformer",
    "MegatronBert",
    "Esm",
    "ConvBert",
    "RemBert",
    "RobertaPreLayerNorm",
    "MobileBert",
):
    hf_model(family, "Model", TOKENS, **SMALL, **DROPPING, max_position_embeddings=40, max_2d_position_embeddings=40)
for family in (
    "Gemma", "Olmo", "Starcoder2", "StableLm", "Cohere", "Granite", "Helium", "Glm", "Nemotron", "Persimmon", "Exaone4", "Lfm2",
    "GPTBigCode", "Mpt", "BitNet", "BioGpt", "Apertus", "MiniMax",
):  # fmt: skip
    hf_model(family, "ForCausalLM", TOKENS, **SMALL, **GROUPED)
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
for family in ("Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss", "Phimoe", "JetMoe"):
    hf_model(family, "ForCausalLM", TOKENS, **SMALL, **GROUPED, **EXPERTS, shared_expert_intermediate_size=16)
hf_model(
    "DeepseekV3", "ForCausalLM", TOKENS, **SMALL, **EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
)  # fmt: skip
NO_CACHE = {"input_ids": ids(2, 10), "use_cache": False}
for family in ("Mamba", "FalconMamba", "Rwkv"):
    hf_model(family, "ForCausalLM", NO_CACHE, **SMALL, state_size=4, attention_hidden_size=32)
hf_model("Mamba2", "ForCausalLM", NO_CACHE, **SMALL, state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)
for family in ("ViTMSN", "IJepa", "Dinov2WithRegisters", "BlipVision", "Aimv2Vision", "InternVLVision", "VitDet"):
    hf_model(family, "Model", PIXELS, **VISION)
hf_model("SamVision", "Model", PIXELS, **VISION, output_channels=16, window_size=2, global_attn_indexes=[3], mlp_dim=48)
hf_model(
    "Swinv2",
    "Model",
    PIXELS,
    6,
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[4, 2],
    num_heads=[2, 2],
    window_size=4,
)
hf_model("CLIPText", "Model", TOKENS, **SMALL, max_position_embeddings=40)
for family in ("WavLM", "Wav2Vec2Conformer", "SEW"):
    hf_model(family, "Model", {"input_values": fixed(2, 800)}, **SPEECH)
for family in ("MBart", "Blenderbot", "M2M100"):
    hf_model(family, "Model", PAIR, 6, **SEQ)
for family in ("UMT5", "LongT5"):
    hf_model(
        family, "Model", PAIR, 6, vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_layers=3, num_heads=4, dropout_rate=0.1,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip

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
        add(
            f"torch decoder, {label}",
            partial(torch_decoder, **way),
            {"tgt": target, "memory": source, "memory_key_padding_mask": PADDED},
            4,
        )
    add(
        f"torch transformer, {norm}-norm",
        partial(torch_transformer, first),
        {
            "src": fixed(2, 5, 16),
            "tgt": fixed(2, 4, 16),
            "src_key_padding_mask": PADDED,
            "memory_key_padding_mask": PADDED,
        },
        6,
    )

# by a trial: diffusers, MONAI, PyTorch Geometric -----------------------------------------------------------------------

LATENT: dict[str, Any] = {"hidden_states": fixed(2, 4, 8, 8), "timestep": torch.tensor([1, 2]), "return_dict": False}
PATCHED: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 4, "norm_num_groups": 4,
    "sample_size": 8, "patch_size": 2, "dropout": 0.1,
}  # fmt: skip
U_NET: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
    "dropout": 0.1,
}
add(
    "diffusers DiT",
    lambda: diffusers.DiTTransformer2DModel(**PATCHED, num_embeds_ada_norm=10),
    {**LATENT, "class_labels": torch.tensor([1, 2])},
    4,
    trial=True,
)
add(
    "diffusers PixArt",
    lambda: diffusers.PixArtTransformer2DModel(
        **PATCHED, cross_attention_dim=16, caption_channels=12, use_additional_conditions=False
    ),
    {
        **LATENT,
        "encoder_hidden_states": fixed(2, 5, 12),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    },
    4,
    trial=True,
)
add(
    "diffusers U-Net",
    lambda: diffusers.UNet2DModel(
        **U_NET,
        layers_per_block=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    {"sample": fixed(2, 3, 16, 16), "timestep": torch.tensor([1, 2]), "return_dict": False},
    11,
    trial=True,
)
add(
    "diffusers Stable Diffusion's U-Net",
    lambda: diffusers.UNet2DConditionModel(
        **U_NET, layers_per_block=2, cross_attention_dim=12, transformer_layers_per_block=3,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    {"sample": fixed(2, 4, 16, 16), "timestep": torch.tensor([1, 2]), "encoder_hidden_states": fixed(2, 5, 12), "return_dict": False},
    16,
    trial=True,
)  # fmt: skip
add(
    "monai SegResNet",
    lambda: monai.SegResNet(
        spatial_dims=3, init_filters=8, out_channels=2, blocks_down=(2, 3), blocks_up=(2,), dropout_prob=0.1
    ),
    fixed(1, 1, 8, 8, 8),
    7,
    trial=True,
)
add(
    "monai SegResNetDS",
    lambda: monai.SegResNetDS(spatial_dims=3, init_filters=8, out_channels=2, blocks_down=(3, 3)),
    fixed(1, 1, 8, 8, 8),
    6,
    trial=True,
)


def rearranged(x: Tensor, pattern: str) -> Tensor:
    """`einops.rearrange` where nothing but the order of dimensions changes; all that SwinUNETR asks of it."""
    before, after = (side.split() for side in pattern.split("->"))
    return x.permute([before.index(name) for name in after])


def swin_unetr() -> nn.Module:
    require("monai.networks.nets.swin_unetr").rearrange = rearranged
    return monai.SwinUNETR(
        1, 2, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), feature_size=12, window_size=2, spatial_dims=2
    )  # type: ignore[no-any-return]


add("monai SwinUNETR", swin_unetr, fixed(1, 1, 64, 64), 8, trial=True)


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


EDGES = torch.randint(0, 12, (2, 40), generator=torch.Generator().manual_seed(5))
for label in ("res+", "res"):
    add(f"geometric DeepGCN {label}", partial(DeepGCN, label), (fixed(12, 8), EDGES), 4, trial=True)
