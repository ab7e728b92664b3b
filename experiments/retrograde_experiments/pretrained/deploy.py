"""Fine-tuned in reverse at one γ, then used as itself and, by `rg.revert`, as the plain network again.

language    SmolLM2-135M on Shakespeare: perplexity on plays it has not been trained on
memory      SmolLM2-135M: peak memory and time of a training step, plain, checkpointed layer by layer, and in reverse at each γ

Steps, rates and batches are the same for every γ; γ = 0 is the plain network, never converted. `deploy_images` does the same with
networks for images.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ..config import Settings
from ..metrics import Key
from . import language, weights
from .text import prepared_text
from .transfer import FALL, deployed, fit, plain_again, shares_of, to_be_plain, with_seed

GAMMAS = (0.0, 1 / 8, 1 / 2, 1 / 16, 1 / 4, 0.9)  # a run cut short has the telling ones
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASELINES = ("plain", "checkpoint")
CHUNK = 256  # tokens whose logits are in memory at a time when memory is measured


@dataclass(frozen=True)
class Config(Settings):
    tasks: tuple[str, ...] = ("memory", "language")
    gammas: tuple[float, ...] = GAMMAS
    ways: tuple[str, ...] = ("kept",)  # or falling, or sign: see `transfer`
    seeds: int = 3
    memory: str = "reverse"
    steps: int = 300
    batch: int = 16
    length: int = 256
    rate: float = 2e-4
    rows: int = 128
    measured_batch: int = 8
    measured_length: int = 1024
    measured_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    repeats: int = 5

    @classmethod
    def small(cls) -> Config:
        """For a CPU: two values of γ, a few steps each."""
        return cls(
            gammas=(0.0, 1 / 8, 0.9), seeds=1, steps=4, batch=2, length=64, rows=4, measured_batch=1,
            measured_length=128, measured_dtypes=("float32",), repeats=2,
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            gammas=(0.0, 1 / 8, 0.9), ways=("kept", "falling"), seeds=1, steps=2, batch=2, length=8, rows=2, measured_batch=1,
            measured_length=16, measured_dtypes=("float32",), repeats=1,
        )  # fmt: skip

    def setting(self) -> str:
        return (
            f"fine-tuning: {self.steps} steps of {self.batch} rows of {self.length} tokens, AdamW, rate {self.rate:g} falling to 0, "
            f"tested on {self.rows} rows of three held-out plays, float32 (TF32 on a GPU), memory={self.memory!r}, {self.seeds} "
            f"seed(s). Memory and time: a step of {self.measured_batch} rows of {self.measured_length} tokens, above parameters and "
            f"gradients, with the logits of {CHUNK} tokens at a time for every method."
        )

    def of_language(self, seed: int) -> language.Config:
        return language.Config(
            steps=self.steps, batch=self.batch, length=self.length, rate=self.rate, rows=self.rows, seed=seed
        )


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    if "memory" in config.tasks:
        for dtype in config.measured_dtypes:
            found += [{"task": "memory", "dtype": dtype, "method": method, "gamma": 0.0} for method in BASELINES]
            found += [{"task": "memory", "dtype": dtype, "method": "reverse", "gamma": g} for g in config.gammas if g]
    if "language" in config.tasks:
        points = deployed(config.gammas, config.ways)
        found += [{"task": "language", **with_seed(point, seed)} for seed in range(config.seeds) for point in points]
    return found


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    return (tuned if unit["task"] == "language" else cost_of_a_step)(config, unit, device, root)


def tuned(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    text, setting = prepared_text(root), config.of_language(unit["seed"])
    net = weights.smollm2(root).to(device)
    to_be_plain(net, unit, config.memory)

    def perplexity() -> float:
        net.eval()
        return math.exp(min(language.tested(setting, net, text["test_tokens"], device), 700.0))

    before = perplexity()
    optimizer = torch.optim.AdamW(net.parameters(), config.rate, betas=(0.9, 0.95), weight_decay=0.0)
    net.train()
    batches = language.rows(setting, text["train_tokens"], device)
    shares = shares_of(unit.get("way", "kept"), config.steps, FALL)
    went = fit(net, batches, lambda batch: language.loss(net, batch), optimizer, config.steps, shares, clip=1.0)
    own = perplexity()
    plain_again(net, unit)
    return {"before": before, "own": own, "plain": perplexity(), **went}


def cost_of_a_step(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    """Peak memory in bytes above parameters and gradients (None on a CPU), and the median time of a step in seconds."""
    net: Any = weights.smollm2(root).to(device, DTYPES[unit["dtype"]])
    if unit["method"] == "checkpoint":
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    to_be_plain(net, unit, "reverse")
    setting = dataclasses.replace(config.of_language(0), batch=config.measured_batch, length=config.measured_length)
    batches = language.rows(setting, prepared_text(root)["train_tokens"], device)
    net.train()

    def step() -> float:
        batch = next(batches)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        _wait(device)
        begun = time.perf_counter()
        loss_in_chunks(net, batch).backward()
        _wait(device)
        return time.perf_counter() - begun

    for _ in range(2):  # gradients, workspaces, the fixed-point range
        step()
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [step() for _ in range(config.repeats)]
    peak = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else None
    return {"peak": peak, "seconds": median(seconds)}


def loss_in_chunks(net: Any, batch: Tensor) -> Tensor:
    """`language.loss`, with the logits of a few tokens at a time: those of all would be most of the memory."""
    hidden = net.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state.flatten(0, 1)
    wanted = batch[:, 1:].flatten()

    def part(hidden: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(net.lm_head(hidden).float(), wanted, reduction="sum")

    pairs = zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True)
    losses: list[Tensor] = [checkpoint(part, h, y, use_reentrant=False) for h, y in pairs]
    return torch.stack(losses).sum() / len(wanted)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
