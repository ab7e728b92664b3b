"""Checkpointing that a model or a trainer turns on: replays take its place, and every gradient is that of stored activations."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import retrograde as rg
from conversion import step
from problems import assert_same_bits
from retrograde.convert import checkpointing
from retrograde.extras import require

with warnings.catch_warnings():  # what these packages warn of when imported
    warnings.simplefilter("ignore")
    tv = require("torchvision.models")
    timm = require("timm")
    hf = require("transformers")
    diffusers = require("diffusers")
    peft = require("peft")
hf.logging.set_verbosity_error()
MODES = ("store", "reverse", "checkpoint", "auto")
REENTRANT = [None, {"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "early_stop": False}]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


IMAGES = draw(2, 3, 32, 32)
TOKENS = torch.randint(3, 60, (2, 10), generator=torch.Generator().manual_seed(4))
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, attention_dropout=0.1))


def lora() -> Any:
    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
    )


class Loop(nn.Module):
    """A model that runs its own blocks, each in the way that it is given."""

    def __init__(self, run: Callable[..., Any] | None = None, depth: int = 6) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1) for _ in range(depth)
        )
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x) if self.run is None else self.run(layer, x)
        out: Tensor = self.head(x)
        return out


def unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=3, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip


def dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=4, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def pixart() -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=4, sample_size=8, patch_size=2,
        cross_attention_dim=16, caption_channels=8, norm_num_groups=4, use_additional_conditions=False,
    )  # fmt: skip


DENOISED: dict[str, dict[str, Any]] = {
    "diffusers UNet": {"sample": draw(2, 3, 16, 16), "timestep": torch.tensor([1, 5])},
    "diffusers DiT": {"hidden_states": draw(2, 3, 8, 8), "timestep": torch.tensor([1, 5]), "class_labels": torch.tensor([3, 4])},
    "diffusers PixArt": {
        "hidden_states": draw(2, 4, 8, 8), "encoder_hidden_states": draw(2, 5, 8), "timestep": torch.tensor([1, 5]),
        "added_cond_kwargs": {},
    },
}  # fmt: skip


def denoised(name: str) -> Callable[[Any], Tensor]:
    return lambda model: model(**DENOISED[name]).sample


def tokens_in(model: Any) -> Tensor:
    out: Tensor = model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), use_cache=False).logits
    return out


def small(name: str, **options: Any) -> Callable[[], Any]:
    return partial(timm.create_model, name, num_classes=5, **options)


VIT = {"img_size": 32, "embed_dim": 24, "depth": 4, "num_heads": 2, "drop_path_rate": 0.2}
SWIN = {"img_size": 32, "embed_dim": 12, "depths": (4, 2), "num_heads": (2, 4), "window_size": 4, "patch_size": 2}
# the model, the call, how checkpointing is turned on
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor], Callable[[Any], Any]]] = {
    **{
        f"transformers, {options}": (llama, tokens_in, lambda m, o=options: m.gradient_checkpointing_enable(o))
        for options in REENTRANT
    },
    "transformers, every other": (llama, tokens_in, lambda m: m.gradient_checkpointing_enable(every_n_layers=2)),
    "transformers, offload": (llama, tokens_in, lambda m: m.gradient_checkpointing_enable(offload=True)),
    **{
        f"peft, {options}": (
            lora, tokens_in, lambda m, o=options: (m.enable_input_require_grads(), m.gradient_checkpointing_enable(o)),
        ) for options in REENTRANT
    },
    "peft, kbit": (lora, tokens_in, lambda m: peft.prepare_model_for_kbit_training(m) and _train_adapters(m)),
    "timm vit": (small("vit_tiny_patch16_224", **VIT), lambda m: m(IMAGES), lambda m: m.set_grad_checkpointing()),
    "timm swin": (small("swin_tiny_patch4_window7_224", **SWIN), lambda m: m(IMAGES), lambda m: m.set_grad_checkpointing()),
    "timm convnext": (
        small("convnext_atto", depths=(2, 2, 3, 2), dims=(4, 8, 8, 8)), lambda m: m(IMAGES), lambda m: m.set_grad_checkpointing(),
    ),
    "timm resnet": (
        small("resnet50", base_width=8, channels=(8, 8, 16, 16)), lambda m: m(IMAGES), lambda m: m.set_grad_checkpointing(),
    ),
    "diffusers UNet": (unet, denoised("diffusers UNet"), lambda m: m.enable_gradient_checkpointing()),
    "diffusers DiT": (dit, denoised("diffusers DiT"), lambda m: m.enable_gradient_checkpointing()),
    "diffusers PixArt": (pixart, denoised("diffusers PixArt"), lambda m: m.enable_gradient_checkpointing()),
    "own": (Loop, lambda m: m(draw(2, 5, 8)), lambda m: setattr(m, "run", partial(checkpoint, use_reentrant=False))),
    "own, selective": (
        Loop, lambda m: m(draw(2, 5, 8)), lambda m: setattr(m, "run", partial(checkpoint, use_reentrant=False, context_fn=_selective)),
    ),
    "wrapper": (Loop, lambda m: m(draw(2, 5, 8)), lambda m: _wrap(m)),
}  # fmt: skip


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def _wrap(model: Any) -> None:
    """What Accelerate's and Lightning's FSDP do for activation checkpointing."""
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, nn.TransformerEncoderLayer)
    )


def _train_adapters(model: Any) -> None:
    """`prepare_model_for_kbit_training` is for the model below the adapters: it freezes all."""
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)


def stepped(
    make: Callable[[], Any],
    call: Callable[[Any], Tensor],
    convert: Callable[[Any], Any],
    *,
    first: Any = None,
    then: Any = None,
) -> Any:
    """One training step of the model, with something done before and after it is converted."""
    torch.manual_seed(0)
    model = make().train()
    for turn in (first, convert, then):
        if turn is not None:
            turn(model)
    found = step(model, call)
    return {name.replace("_checkpoint_wrapped_module.", ""): t for name, t in found.items()}


def converting(name: str, memory: str) -> Callable[[Any], Any]:
    return lambda m: rg.convert(m, DENOISED.get(name), gamma=0.5, memory=memory)


def without_statistics(found: dict[str, Tensor], memory: str) -> dict[str, Tensor]:
    """With memory="store" the model goes on checkpointing blocks that are not converted, and runs their BatchNorms twice."""
    return found if memory != "store" else {key: t for key, t in found.items() if "buffer" not in key}


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:.*offload.*", "ignore:.*pin.*")
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("name", CASES)
def test_turned_on(name: str, memory: str) -> None:
    """After converting, as trainers do, and before."""
    make, call, turn_on = CASES[name]
    frozen = _train_adapters if name == "peft, kbit" else None
    exact = without_statistics(stepped(make, call, converting(name, "store"), first=frozen), memory)
    assert sum("gradient" in key for key in exact) > 4
    for when in ("then", "first"):
        found = stepped(make, call, converting(name, memory), **{when: turn_on})
        assert_same_bits(without_statistics(found, memory), exact)


BLOCKS = draw(2, 5, 8)


def halves(model: Loop) -> nn.Sequential:
    return nn.Sequential(nn.Sequential(model.stem, *model.layers[:3]), nn.Sequential(*model.layers[3:], model.head))


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_whole_stage(memory: str, reentrant: bool) -> None:
    """It holds what is not converted, too. That is run again, and the stage with it, as a pass of its own."""

    def convert(model: Any) -> None:
        rg.convert(model, stages=["0.[123]", "1.[012]"], gamma=0.5, memory=memory)

    def make() -> nn.Module:
        return halves(Loop())

    def checkpointed(model: Any) -> Tensor:
        x = BLOCKS.clone().requires_grad_()
        for half in model:
            x = checkpoint(half, x, use_reentrant=reentrant)
        return x

    exact = stepped(make, lambda m: m(BLOCKS.clone().requires_grad_()), convert)
    assert_same_bits(stepped(make, checkpointed, convert), exact)


class Shared(nn.Module):
    """One block, run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.run: Callable[..., Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layer(x) if self.run is None else self.run(self.layer, x)
        return x


@pytest.mark.filterwarnings("ignore:.*loop.*")
@pytest.mark.parametrize("make", [Loop, Shared])
def test_what_cannot_be_put_aside_is_refused(make: Callable[[], Any]) -> None:
    model = rg.convert(make().train(), None if make is Loop else BLOCKS, gamma=0.5)
    x = BLOCKS.clone().requires_grad_()
    model.run = partial(checkpoint, use_reentrant=True)
    with pytest.raises(
        rg.ReplayError, match=r"way that runs a block without gradients first.*Pass use_reentrant=False"
    ):
        model(x)
    exact = copy.deepcopy(model)
    exact.run, model.run = None, partial(checkpoint, use_reentrant=False)
    assert_same_bits(step(model, lambda m: m(x)), step(exact, lambda m: m(x)))
    if make is Loop:
        model.run = lambda layer, x: checkpoint(lambda x: torch.sin(layer(x)), x, use_reentrant=False)
        with (
            pytest.warns(UserWarning, match="velocity starts from 0"),
            pytest.raises(rg.ReplayError, match=r"a checkpoint holds it together with something that is not converted"),
        ):
            model(x).sum().backward()


def test_checkpoint_sequential() -> None:
    model = nn.Sequential(*Loop().layers)
    rg.convert(model, gamma=0.5, memory="reverse")
    x = BLOCKS.clone().requires_grad_()
    exact = step(model, lambda m: m(x))
    for segments in (1, 2, 3, 6):
        assert_same_bits(step(model, lambda m: checkpoint_sequential(m, segments, x, use_reentrant=False)), exact)  # noqa: B023


def test_said_once(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.say_once.cache_clear()
    models = [
        rg.convert(llama().train()),
        rg.convert(timm.create_model("vit_tiny_patch16_224", **VIT).train(), memory="store"),
    ]
    with caplog.at_level(logging.INFO, "retrograde"):
        tokens_in(models[0])
        assert not caplog.records
        models[0].gradient_checkpointing_enable()
        models[1].set_grad_checkpointing()
        for _ in range(2):
            tokens_in(models[0])
            models[1](IMAGES)
    (record,) = caplog.records
    assert record.name == "retrograde"
    assert "Its converted blocks are not checkpointed" in record.message


def test_flags_stay_as_they_are_set() -> None:
    """Who asks is told, and a reverted model is checkpointed as it would have been."""
    model = llama().train()
    rg.convert(model, memory="store")
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    kept = copy.deepcopy(model)
    assert kept.is_gradient_checkpointing
    runs: list[str] = []
    for name, layer in model.model.layers.named_children():
        layer.mlp.register_forward_pre_hook(lambda *_, name=name: runs.append(name))
    tokens_in(model).sum().backward()
    assert len(runs) == 4
    tokens_in(rg.revert(model)).sum().backward()
    assert len(runs) == 4 + 8
    model.gradient_checkpointing_disable()
    tokens_in(model).sum().backward()
    assert len(runs) == 4 + 8 + 4


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_nothing_more_is_held(memory: str) -> None:
    """A checkpoint that was put aside keeps nothing of its own."""
    model: Any = rg.convert(Loop(depth=12).train(), memory=memory)
    rg.measure(model, BLOCKS)
    plain = rg.measure(model, BLOCKS)
    model.run = lambda layer, x: checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    with_flags = rg.measure(model, BLOCKS)
    assert with_flags.held <= plain.held + 64, (with_flags, plain)
    assert with_flags.peak <= plain.peak * 1.01, (with_flags, plain)


def test_plans_and_trials_of_a_checkpointed_model() -> None:
    model = llama().train()
    calm = rg.plan(model, {"input_ids": TOKENS, "use_cache": False}, gamma=0.5)
    model.gradient_checkpointing_enable()
    flagged = rg.plan(model, {"input_ids": TOKENS, "use_cache": False}, gamma=0.5)
    assert flagged.peaks == calm.peaks
    rg.convert(model, {"input_ids": TOKENS, "use_cache": False}, gamma="auto", memory="100MB")
    tokens_in(model).sum().backward()


def test_names_without_the_wrapper() -> None:
    model = llama()
    apply_activation_checkpointing(
        model, check_fn=lambda m: isinstance(m, hf.models.llama.modeling_llama.LlamaDecoderLayer)
    )
    rg.convert(model, gamma=0.25)
    (record,) = model.config.retrograde["stages"]
    assert (record["blocks"], record["gamma"]) == ("model.layers.0-3", "1/4")
    again = llama()
    again.config.retrograde = model.config.retrograde
    apply_activation_checkpointing(
        again, check_fn=lambda m: isinstance(m, hf.models.llama.modeling_llama.LlamaDecoderLayer)
    )
    assert "momentum, gamma=1/4" in repr(rg.convert(again))
