"""Memory of a training step, predicted (`rg.plan`) against measured (`rg.measure`), on one GPU.

    PYTHONPATH=src python benchmarks/predict.py [--only resnet]

Each model runs plain, with every block checkpointed, in reverse and as memory="auto" chooses. Peak and held bytes are above
parameters, gradients and batch.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.extras import require
from retrograde.memory import human

WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "checkpoint": {"gamma": 0, "memory": "checkpoint"},
    "reverse": {"memory": "reverse"},
    "auto": {},
}


class Autocast(nn.Module):
    """A model whose forward pass is in mixed precision."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.model(*args, **kwargs)


def images(batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, device="cuda")


def llama() -> nn.Module:
    transformers = require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=24, num_attention_heads=12,
        num_key_value_heads=12, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def cases() -> dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], torch.dtype | None]]:
    models = require("torchvision").models
    tokens = {"input_ids": torch.randint(0, 8192, (8, 1024), device="cuda")}
    return {
        "resnet50 64×224², fp32": (models.resnet50, lambda: images(64), None),
        "resnet152 64×224², fp32": (models.resnet152, lambda: images(64), None),
        "vit_b_16 64×224², fp32": (models.vit_b_16, lambda: images(64), None),
        "vit_b_16 64×224², bf16": (models.vit_b_16, lambda: images(64), torch.bfloat16),
        "convnext_base 32×224², fp32": (models.convnext_base, lambda: images(32), None),
        "swin_t 64×224², fp32": (models.swin_t, lambda: images(64), None),
        "llama L24 d768 8×1024, fp32": (llama, lambda: tokens, None),
        "llama L24 d768 8×1024, bf16": (llama, lambda: tokens, torch.bfloat16),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases with this in their name")
    only: str = parser.parse_args().only
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| model | way | peak, predicted | measured | ratio | held, predicted | measured | ratio |")
    print("|---" * 8 + "|")
    for name, (make, batch, dtype) in cases().items():
        if only not in name:
            continue
        torch.manual_seed(0)
        model, x = make().cuda().train(), batch()
        planned = rg.plan(model, x, autocast=dtype)
        for way, options in WAYS.items():
            if options is not None:
                rg.convert(model, **options)
            found, expected = rg.measure(Autocast(model, dtype), x, repeats=3, warmup=2), planned.peaks[way]
            cells = [human(expected.peak), human(found.peak), f"{expected.peak / found.peak:.3f}"]
            cells += [human(expected.held), human(found.held), f"{expected.held / found.held:.3f}"]
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)
            if options is not None:
                rg.revert(model)
            del found
            gc.collect()
            torch.cuda.empty_cache()
        del model, x
        gc.collect()


if __name__ == "__main__":
    main()
