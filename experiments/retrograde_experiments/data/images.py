"""A set of small images, whole and in memory as bytes, and the check that it is the set it claims to be.

What is known of a published set is written down in a `Spec`: how many images, of which size, how many of each class, their mean, and
a digest of all images and labels. The digest is a XOR over the images, so it does not depend on the order in which a layout
keeps them: the same set in another layout has the same digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ExperimentError

VARIABLE = "RETROGRADE_DATA"


class DataError(ExperimentError):
    """Data that is missing, damaged or not what it should be; the message says what to put where."""


@dataclass(frozen=True)
class Spec:
    """What is known of a set."""

    name: str
    classes: int
    train: int
    test: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]  # of the training images, per channel, on the scale 0 … 255
    std: tuple[float, ...]
    per_class: tuple[int, int] | None = None  # images of each class for training and testing, where all have as many
    digest: str | None = None
    flip: bool = True  # whether an image and its mirror image show the same thing
    pad: int = 4  # pixels by which an image may be shifted in training


@dataclass(frozen=True)
class Images:
    """A set in memory: x of dtype uint8 (count, channels, height, width), y of dtype int64."""

    spec: Spec
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    source: str = ""


def data_dir(given: str | Path | None = None) -> Path:
    """Where data is looked for: the folder given, else `RETROGRADE_DATA`, else `data` in the current folder."""
    return Path(given or os.environ.get(VARIABLE) or "data").expanduser()


def missing(spec_name: str, root: Path, wanted: str, how: str) -> DataError:
    """The error for a set that is not there."""
    return DataError(
        f"{spec_name} was not found in {root.absolute()} (set by --data-dir or {VARIABLE}).\nIt may lie there as\n{wanted}\n"
        f"To get it: {how}"
    )


def damaged(path: Path | str, what: str, how: str) -> DataError:
    """The error for a file that is there but wrong."""
    return DataError(f"{path} is damaged or is not the file it should be: {what}.\nReplace it: {how}")


def verified(images: Images, how: str) -> Images:
    """The set, if it is the one that its spec describes.

    Raises:
        DataError: naming the first thing that differs: count, shape, labels, mean, or a single image.
    """
    spec, where = images.spec, images.source or images.spec.name
    for part, x, y, count in _parts(images):
        if x.shape != (count, *spec.shape) or y.shape != (count,) or x.dtype != torch.uint8:
            found = f"{len(x)} images of shape {tuple(x.shape[1:])} and {len(y)} labels for {part}"
            raise damaged(where, f"{found}, where {spec.name} has {count} of shape {spec.shape}", how)
        if int(y.min()) < 0 or int(y.max()) >= spec.classes:
            raise damaged(
                where, f"labels for {part} run from {int(y.min())} to {int(y.max())}, not 0 … {spec.classes - 1}", how
            )
        counts = torch.bincount(y, minlength=spec.classes)
        wanted = None if spec.per_class is None else spec.per_class[part == "testing"]
        if wanted is not None and not bool((counts == wanted).all()):
            raise damaged(where, f"images of each class for {part} are {counts.tolist()}, where each has {wanted}", how)
    mean = images.train_x.sum((0, 2, 3), dtype=torch.int64).double() / images.train_x[:, 0].numel()
    if float((mean - torch.tensor(spec.mean, dtype=torch.float64)).abs().max()) > 0.01:
        found = ", ".join(f"{m:.3f}" for m in mean.tolist())
        raise damaged(where, f"the mean of the training images is {found}, where it should be {spec.mean}", how)
    if spec.digest is not None and digest(images) != spec.digest:
        raise damaged(where, f"an image or a label differs (digest {digest(images)}, published {spec.digest})", how)
    return images


def digest(images: Images) -> str:
    """Of all images with their labels, whatever their order."""
    total = 0
    for part, x, y, _ in _parts(images):
        pixels = np.ascontiguousarray(x.numpy())
        for image, label in zip(pixels, y.tolist(), strict=True):
            total ^= int.from_bytes(
                blake2b(image.tobytes(), digest_size=8, key=f"{part} {label}".encode()).digest(), "big"
            )
    return f"{total:016x}"


def _parts(images: Images) -> Iterator[tuple[str, Tensor, Tensor, int]]:
    yield "training", images.train_x, images.train_y, images.spec.train
    yield "testing", images.test_x, images.test_y, images.spec.test
