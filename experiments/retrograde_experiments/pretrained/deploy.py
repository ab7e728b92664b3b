"""Fine-tuned in reverse at one γ, then used as itself and, by `rg.revert`, as the plain network again.

language    SmolLM2-135M on Shakespeare, every parameter: perplexity on plays it has not been trained on
lora        the same with LoRA: matrices of low rank beside frozen weights
sentences   MiniLM and a linear layer, which tell from a sentence of Shakespeare the play: accuracy in % on sentences held out

Steps, rates and batches are the same for every γ; γ = 0 is the plain network, never converted. `deploy_images` does the same with
networks for images, `cost` measures memory and time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from retrograde.extras import require

from ..config import Settings
from ..metrics import Key
from . import language, weights
from .text import prepared_text
from .transfer import FALL, deployed, fit, plain_again, shares_of, to_be_plain, with_seed

GAMMAS = (0.0, 1 / 8, 1 / 2, 1 / 16, 1 / 4, 0.9)  # a run cut short has the telling ones
TASKS = ("language", "lora", "sentences")


@dataclass(frozen=True)
class Config(Settings):
    tasks: tuple[str, ...] = TASKS
    gammas: tuple[float, ...] = GAMMAS
    ways: tuple[str, ...] = ("kept",)  # or falling, or sign: see `transfer`
    seeds: int = 3
    memory: str = "reverse"
    steps: int = 300
    long: int = 1000
    long_gammas: tuple[float, ...] = (0.0, 1 / 8, 1 / 16)
    batch: int = 16
    length: int = 256
    rate: float = 2e-4
    rows: int = 128
    lora_rank: int = 16
    lora_rate: float = 1e-3
    lora_gammas: tuple[float, ...] = (0.0, 1 / 8, 1 / 16)
    sentence_epochs: int = 6
    sentence_batch: int = 64
    sentence_rate: float = 1e-4

    @classmethod
    def small(cls) -> Config:
        """For a CPU: two values of γ, a few steps each."""
        return cls(
            gammas=(0.0, 1 / 8, 0.9), seeds=1, steps=4, long=6, long_gammas=(0.0,), batch=2, length=64, rows=4,
            lora_gammas=(0.0, 1 / 8), sentence_epochs=1,
        )  # fmt: skip

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            gammas=(0.0, 1 / 8, 0.9), ways=("kept", "falling"), seeds=1, steps=2, long=3, long_gammas=(0.0,), batch=2,
            length=8, rows=2, lora_rank=2, lora_gammas=(0.0, 1 / 8), sentence_epochs=1, sentence_batch=8,
        )  # fmt: skip

    def setting(self) -> str:
        return (
            f"SmolLM2: {self.steps} or {self.long} steps of {self.batch} rows of {self.length} tokens, AdamW, rate {self.rate:g} "
            f"(LoRA of rank {self.lora_rank}: {self.lora_rate:g}) falling to 0, tested on {self.rows} rows of three held-out plays. "
            f"MiniLM: {self.sentence_epochs} epochs in batches of {self.sentence_batch}, AdamW, rate {self.sentence_rate:g} falling "
            f"to 0. float32 (TF32 on a GPU), memory={self.memory!r}, {self.seeds} seed(s); falling: over the last "
            f"{100 * FALL:.0f} % of the steps."
        )

    def of_language(self, unit: Key) -> language.Config:
        rate = self.lora_rate if unit["task"] == "lora" else self.rate
        steps = unit.get("steps", self.steps)
        return language.Config(
            steps=steps, batch=self.batch, length=self.length, rate=rate, rows=self.rows, seed=unit["seed"]
        )


def units(config: Config) -> list[Key]:
    """Fine-tunings of the usual length first; those that are longer say how long they are."""
    found: list[Key] = []
    gammas = {"language": config.gammas, "lora": config.lora_gammas, "sentences": config.gammas}
    for task in config.tasks:
        points = deployed(gammas[task], config.ways)
        found += [{"task": task, **with_seed(point, seed)} for point in points for seed in range(config.seeds)]
    if "language" in config.tasks:
        long = {"task": "language", "steps": config.long}
        points = deployed(config.long_gammas, config.ways)
        found += [{**long, **with_seed(point, seed)} for point in points for seed in range(config.seeds)]
    return found


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    return (_sentences if unit["task"] == "sentences" else _language)(config, unit, device, root)


def _language(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    text, setting = prepared_text(root), config.of_language(unit)
    net = weights.smollm2(root).to(device)
    to_be_plain(net, unit, config.memory)
    whole = net
    if unit["task"] == "lora":
        torch.manual_seed(unit["seed"])
        whole = with_lora(net, config.lora_rank)

    def perplexity() -> float:
        whole.eval()
        return math.exp(min(language.tested(setting, whole, text["test_tokens"], device), 700.0))

    before = perplexity()
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, setting.rate, betas=(0.9, 0.95), weight_decay=0.0)
    whole.train()
    batches = language.rows(setting, text["train_tokens"], device)
    shares = shares_of(unit.get("way", "kept"), setting.steps, FALL)
    went = fit(whole, batches, lambda batch: language.loss(whole, batch), optimizer, setting.steps, shares, clip=1.0)
    own = perplexity()
    plain_again(net, unit)
    return {"before": before, "own": own, "plain": perplexity(), **went}


def with_lora(net: nn.Module, rank: int) -> nn.Module:
    """The network with low-rank matrices beside every linear layer but the head; all else is frozen."""
    peft = require("peft")
    made: nn.Module = peft.get_peft_model(
        net, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    )
    return made


class PlayOf(nn.Module):
    """Which play a sentence is from: an encoder and a linear layer on its sentence vector."""

    def __init__(self, encoder: nn.Module, width: int, plays: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, plays)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(weights.embedded(self.encoder, ids, mask) * self.head.in_features**0.5)
        return logits


def _sentences(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    text = {name: t.long().to(device) for name, t in prepared_text(root).items() if name.startswith("play_")}
    ids, mask, label = text["play_ids"], text["play_mask"], text["play_label"]
    held = len(label) // 6  # they are in an order of their own
    encoder: Any = weights.minilm(root).to(device)
    torch.manual_seed(unit["seed"])
    net = PlayOf(encoder, encoder.config.hidden_size, int(label.max()) + 1).to(device)
    to_be_plain(net.encoder, unit, config.memory)

    def batches() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(unit["seed"])
        while True:
            order = held + torch.randperm(len(label) - held, generator=draw)
            yield from order[: len(order) // config.sentence_batch * config.sentence_batch].split(config.sentence_batch)

    def accuracy() -> float:
        net.eval()
        with torch.no_grad():
            parts = zip(ids[:held].split(500), mask[:held].split(500), label[:held].split(500), strict=True)
            return 100 * sum(int((net(i, m).argmax(1) == y).sum()) for i, m, y in parts) / held

    optimizer = torch.optim.AdamW(net.parameters(), config.sentence_rate, weight_decay=0.0)
    net.train()
    steps = config.sentence_epochs * max(1, (len(label) - held) // config.sentence_batch)
    shares = shares_of(unit.get("way", "kept"), steps, FALL)

    def loss(chosen: Tensor) -> Tensor:
        return cross_entropy(net(ids[chosen], mask[chosen]), label[chosen])

    went = fit(net, batches(), loss, optimizer, steps, shares, clip=1.0)
    own = accuracy()
    plain_again(net.encoder, unit)
    return {"own": own, "plain": accuracy(), **went}
