"""Memory of a training step, predicted by `rg.plan` against measured by `rg.measure`, on one GPU.

Each model runs plain, with every block checkpointed, in reverse, and as memory="auto" chooses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.extras import require

from .cases import selected
from .record import Row

Way = tuple[str, dict[str, Any] | None]  # as the table calls it, and options of `rg.convert`
WAYS: dict[str, Way] = {  # by the name that `Plan.peaks` has for it
    "plain": ("plain", None),
    "checkpoint": ("checkpoint", {"gamma": 0, "memory": "checkpoint"}),
    "reverse": ("ours[memory=reverse,by=convert]", {"gamma": 0.9, "memory": "reverse"}),
    "auto": ("ours[memory=auto,by=convert]", {"gamma": 0.9, "memory": "auto"}),
}


@dataclass(frozen=True)
class Model:
    """A model, its batch, and the dtype of autocast or None."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    dtype: torch.dtype | None = None


class Autocast(nn.Module):
    """A model whose forward pass is in mixed precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.model(*args, **kwargs)


def _llama() -> nn.Module:
    transformers = require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=24, num_attention_heads=12,
        num_key_value_heads=12, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def models() -> list[Model]:
    def images(name: str, batch: int, dtype: torch.dtype | None = None) -> Model:
        def made() -> Tensor:
            return torch.randn(batch, 3, 224, 224, device="cuda")

        precision = "fp32" if dtype is None else "bf16"
        make = getattr(require("torchvision").models, name)
        return Model(f"{name}-{precision}", f"{name} {batch}×224², {precision}", make, made, dtype)

    def tokens() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(0, 8192, (8, 1024), device="cuda")}

    return [
        images("resnet50", 64), images("resnet152", 64), images("vit_b_16", 64), images("vit_b_16", 64, torch.bfloat16),
        images("convnext_base", 32), images("swin_t", 64),
        Model("llama-fp32", "llama L24 d768 8×1024, fp32", _llama, tokens),
        Model("llama-bf16", "llama L24 d768 8×1024, bf16", _llama, tokens, torch.bfloat16),
    ]  # fmt: skip


def rows(patterns: Sequence[str], facts: Row) -> Iterator[Row]:
    """A row for each model and way."""
    for model in selected(models(), patterns, "model"):
        torch.manual_seed(0)
        net, x = model.make().cuda().train(), model.batch()
        planned = rg.plan(net, x, autocast=model.dtype)
        for way, (written, options) in WAYS.items():
            if options is not None:
                rg.convert(net, **options)
            found = rg.measure(Autocast(net, model.dtype), x, repeats=3, warmup=2)
            expected = planned.peaks[way]
            times = {"median": 1e3 * found.times.median, "best": 1e3 * found.times.min, "repeats": 3}
            yield replace(
                facts, case=model.name, title=model.title, method=written, peak=found.peak, held=found.held, predicted=expected.peak,
                predicted_held=expected.held, **times,  # type: ignore[arg-type]
            )  # fmt: skip
            if options is not None:
                rg.revert(net)
            del found
            gc.collect()
            torch.cuda.empty_cache()
        del net, x
        gc.collect()
