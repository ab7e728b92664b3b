"""Photographs that come with scikit-image and scikit-learn, and what an ImageNet network should see in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from retrograde.extras import require

from ..data.images import data_dir
from .weights import FOLDER, PREPARE, Root, read_tensors

PHOTOS = {
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "camera": ("skimage", "data/camera.png"),
    "palace": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
"""Name: the package and the file in it."""

KNOWN = {"cat": ("tabby", "tiger cat", "Egyptian cat"), "coffee": ("espresso",), "palace": ("palace",)}
"""What the plain network must say, for its weights to be the ones they should be."""


def files() -> dict[str, Path]:
    """Where the photographs are."""
    return {name: Path(str(require(package).__file__)).parent / file for name, (package, file) in PHOTOS.items()}


def prepared_photos(root: Root = None) -> tuple[list[str], Tensor]:
    """Their names, and the middle of each as 224×224 pixels: uint8 (count, height, width, 3).

    Raises:
        DataError: if the file is not there.
    """
    base = data_dir(root)
    held, about = read_tensors(base / FOLDER / "photos.pt", base, PREPARE.format(root=base))
    return about["names"], held["pixels"]


def categories() -> list[str]:
    """The names of ImageNet's classes, in the order of a network's outputs."""
    meta: dict[str, Any] = require("torchvision.models").ResNet50_Weights.IMAGENET1K_V1.meta
    return list(meta["categories"])
