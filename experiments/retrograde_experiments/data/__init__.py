"""Real data, verified: where it is looked for, what it must contain, and how it gets to the device.

images    a set of small images in memory, and the check of its contents
cifar     CIFAR-10 and CIFAR-100 in four layouts; idx: MNIST and Fashion-MNIST; digits: those of scikit-learn
folder    folders of images, ImageNet's among them
batches   batches on the device, shuffled and augmented there
pack      CIFAR-10 as one file, or in parts small enough to carry
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import suggestion
from .cifar import CIFAR10, CIFAR100, load_cifar
from .digits import DIGITS, load_bundled_digits
from .idx import FASHION, MNIST, load_idx
from .images import DataError, Images, Spec, data_dir

SMALL: dict[str, tuple[Spec, Callable[[Spec, Path], Images]]] = {
    "cifar10": (CIFAR10, load_cifar),
    "cifar100": (CIFAR100, load_cifar),
    "mnist": (MNIST, load_idx),
    "fashion": (FASHION, load_idx),
    "digits": (DIGITS, load_bundled_digits),
}
"""The sets that fit into memory, by name."""

FOLDERS = ("imagenet", "hymenoptera")
NAMES = (*SMALL, *FOLDERS)


def load(name: str, root: str | Path | None = None) -> Images:
    """A small set by name, verified. `root`: see `data_dir`.

    Raises:
        DataError: if there is no such set, or its files are missing or wrong.
    """
    if name not in SMALL:
        raise DataError(f"there is no set of small images called {name!r}. {suggestion(name, SMALL)}")
    spec, read = SMALL[name]
    return read(spec, data_dir(root))


__all__ = ["FOLDERS", "NAMES", "SMALL", "DataError", "Images", "Spec", "data_dir", "load"]
