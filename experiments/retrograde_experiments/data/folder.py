"""Folders of images, `train/CLASS/*.jpg` and `val/CLASS/*.jpg`: ImageNet, hymenoptera, or any other.

Images are decoded by worker processes. Training: a random part of the image (8 to 100 % of its area), scaled to a square, half
of them flipped; testing: the middle of the image. What is cut out of an image follows from the seed, the epoch and the
image alone, whatever the number of workers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from retrograde.extras import require

from .batches import Batch
from .images import DataError, damaged, data_dir, missing

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet, which pretrained networks expect
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
PARTS = ("train", "val")


@dataclass(frozen=True)
class FolderSpec:
    """What is known of a set of folders; None: anything."""

    name: str
    classes: int | None = None
    train: int | None = None
    val: int | None = None
    how: str = "put one folder per class into train/ and into val/."


SPECS = {
    "imagenet": FolderSpec(
        "imagenet", 1000, 1_281_167, 50_000,
        "it is given to those who register for it: unpack the training archives into train/nXXXXXXXX and the validation images into "
        "val/nXXXXXXXX, one folder per class.",
    ),
    "hymenoptera": FolderSpec(
        "hymenoptera", 2, 244, 153, "put the ants and bees into train/ants, train/bees, val/ants and val/bees."
    ),
    "folder": FolderSpec("folder"),
}  # fmt: skip


@dataclass(frozen=True)
class ImageFolders:
    """Paths and classes of all images. `skipped`: files that are no images."""

    spec: FolderSpec
    root: Path
    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    val: tuple[tuple[Path, int], ...]
    skipped: tuple[Path, ...]


def load_folders(name: str, root: str | Path | None = None) -> ImageFolders:
    """The images of a set by name, counted; "folder" is any set, in the data directory itself.

    Raises:
        DataError: if there is none, classes differ between train and val, or the counts are not the published ones.
    """
    spec, base = SPECS[name], data_dir(root)
    folder = next((f for f in (base / name, base) if all((f / part).is_dir() for part in PARTS)), None)
    if folder is None:
        raise missing(
            name, base, f"  {base / name}/train/CLASS/IMAGE.jpg\n  {base / name}/val/CLASS/IMAGE.jpg", spec.how
        )
    classes = {part: tuple(sorted(d.name for d in (folder / part).iterdir() if d.is_dir())) for part in PARTS}
    if classes["train"] != classes["val"] or not classes["train"]:
        differ = sorted(set(classes["train"]) ^ set(classes["val"]))
        raise damaged(
            folder,
            f"the classes of train/ and val/ differ in {', '.join(differ[:5]) or 'nothing: there are none'}",
            spec.how,
        )
    found: dict[str, tuple[tuple[Path, int], ...]] = {}
    skipped: list[Path] = []
    for part in PARTS:
        files = [
            (f, k) for k, c in enumerate(classes[part]) for f in sorted((folder / part / c).iterdir()) if f.is_file()
        ]
        found[part] = tuple((f, k) for f, k in files if f.suffix.lower() in ENDINGS)
        skipped += [f for f, _ in files if f.suffix.lower() not in ENDINGS]
        wanted = getattr(spec, part)
        if not found[part] or wanted not in (None, len(found[part])):
            raise damaged(
                folder / part, f"it has {len(found[part])} images, where {name} has {wanted or 'some'}", spec.how
            )
    if spec.classes not in (None, len(classes["train"])):
        raise damaged(folder, f"it has {len(classes['train'])} classes, where {name} has {spec.classes}", spec.how)
    return ImageFolders(spec, folder, classes["train"], found["train"], found["val"], tuple(skipped))


def decode(path: Path) -> Any:
    """The image at a path, in RGB.

    Raises:
        DataError: if it cannot be read, naming it.
    """
    try:
        with require("PIL.Image").open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"the image {path} cannot be read: {error}. Replace it, or take it out of the folder."
        ) from error


def middle(image: Any, size: int, resize: float = 256 / 224) -> np.ndarray:
    """The middle of an image as a square of `size` pixels, after scaling its shorter side to `resize` times that."""
    w, h = image.size
    side = min(w, h) / resize
    box = ((w - side) / 2, (h - side) / 2, (w + side) / 2, (h + side) / 2)
    return np.asarray(image.resize((size, size), resample=2, box=box))


def random_part(image: Any, size: int, draw: random.Random, smallest: float = 0.08) -> np.ndarray:
    """A random part of an image, of `smallest` to all of its area and 3:4 to 4:3, as a square; flipped or not."""
    w, h = image.size
    for _ in range(10):
        area, ratio = w * h * draw.uniform(smallest, 1), math.exp(draw.uniform(-1, 1) * math.log(4 / 3))
        cw, ch = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if cw <= w and ch <= h:
            break
    else:
        cw = ch = min(w, h)
    left, top = draw.uniform(0, w - cw), draw.uniform(0, h - ch)
    pixels = np.asarray(image.resize((size, size), resample=2, box=(left, top, left + cw, top + ch)))
    return pixels[:, ::-1] if draw.random() < 0.5 else pixels


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Image number `index`, as training epoch `epoch` sees it; epoch −1 is the test."""

    def __init__(self, files: tuple[tuple[Path, int], ...], size: int, seed: int) -> None:
        self.files, self.size, self.seed = files, size, seed

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        index, epoch = item
        path, label = self.files[index]
        if epoch < 0:
            pixels = middle(decode(path), self.size)
        else:
            pixels = random_part(decode(path), self.size, random.Random(f"{self.seed} {epoch} {index}"))
        return torch.from_numpy(pixels.copy()), label


class FolderBatches:
    """Batches of folders of images, as `Resident` gives them of a small set.

    Args:
        folders: the set.
        batch: images in a training batch, over all processes.
        size: pixels of a side of the square.
        workers: processes that decode; 0: this one does.
    """

    channels = 3

    def __init__(
        self, folders: ImageFolders, batch: int, *, size: int = 224, seed: int = 0, device: torch.device | str = "cpu",
        workers: int = 0, test_batch: int = 100, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        if not 1 <= batch <= len(folders.train) or batch % world:
            raise ValueError(
                f"batch must be from 1 to {len(folders.train)} and a multiple of {world} processes; got {batch}."
            )
        self.folders, self.batch, self.seed, self.device = folders, batch, seed, torch.device(device)
        self.classes, self.size, self.steps = len(folders.classes), len(folders.train), len(folders.train) // batch
        self.rank, self.share, self.test_batch = rank, batch // world, test_batch
        pinned = self.device.type == "cuda"
        self.loader = partial(DataLoader, num_workers=workers, pin_memory=pinned)
        self.train, self.val = _Decoded(folders.train, size, seed), _Decoded(folders.val, size, seed)
        self.mean, self.std = (torch.tensor(values, device=device) for values in (MEAN, STD))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        order = torch.randperm(
            self.size, generator=torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        ).tolist()
        firsts = (k * self.batch + self.rank * self.share for k in range(start, self.steps))
        yield from self._batches(self.train, [[(i, epoch) for i in order[f : f + self.share]] for f in firsts])

    def test(self) -> Iterator[Batch]:
        every = range(len(self.folders.val))
        yield from self._batches(
            self.val, [[(i, -1) for i in every[f : f + self.test_batch]] for f in every[:: self.test_batch]]
        )

    def _batches(self, images: _Decoded, chosen: list[list[tuple[int, int]]]) -> Iterator[Batch]:
        for x, y in self.loader(images, batch_sampler=chosen):
            x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
            yield ((x.float() - self.mean) / self.std).permute(0, 3, 1, 2), y
