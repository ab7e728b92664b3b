"""CIFAR-10 for another machine: as one file, or in parts that are each small enough to carry.

    python -m retrograde_experiments.data.pack --data-dir data --out parts              # parts/1, parts/2, … of at most 60 MiB
    python -m retrograde_experiments.data.pack --data-dir data --out packed --single    # packed/cifar10.safetensors, 184 MB

The parts are files of the mosaic layout: lossless WebP, 103 MB in all. Put the files of all parts into one folder and the loader
reads it.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

from torch import Tensor

from retrograde.extras import require

from ..errors import ExperimentError
from ..metrics import write_atomic, writing
from . import load
from .images import Images


def single(images: Images, out: Path) -> Path:
    """Write the set as one file."""
    path = out / f"{images.spec.name}.safetensors"
    names = ("train_x", "train_y", "test_x", "test_y")
    write_atomic(path, require("safetensors.torch").save({name: getattr(images, name).contiguous() for name in names}))
    return path


def parts(images: Images, out: Path, limit: int) -> list[Path]:
    """Write the mosaic layout into folders 1, 2, … of `out`, each of at most `limit` bytes."""
    size = images.spec.train // 5
    files = {
        "train_lables.json": json.dumps(images.train_y.tolist()).encode(),
        "test_lables.json": json.dumps(images.test_y.tolist()).encode(),
        "test_batch.webp": _mosaic(images.test_x),
    }
    files |= {f"data_batch_{k + 1}.webp": _mosaic(images.train_x[k * size : (k + 1) * size]) for k in range(5)}
    folder, used, made = 1, 0, []
    for name, data in files.items():
        if len(data) > limit:
            raise ExperimentError(
                f"{name} takes {len(data)} bytes, more than a part may have ({limit}): raise --part-mib."
            )
        if used + len(data) > limit:
            folder, used = folder + 1, 0
        used += len(data)
        path = out / str(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
        made.append(path)
    return made


def _mosaic(x: Tensor) -> bytes:
    """The images side by side, about as many across as down."""
    across = max(n for n in range(1, int(len(x) ** 0.5) + 1) if len(x) % n == 0)
    tiles = x.permute(0, 2, 3, 1).reshape(-1, across, 32, 32, 3).transpose(1, 2)
    data = io.BytesIO()
    picture = require("PIL.Image").fromarray(tiles.reshape(-1, 32 * across, 3).numpy())
    picture.save(data, "WEBP", lossless=True, quality=60, method=4)
    return data.getvalue()


def main(arguments: list[str] | None = None) -> None:
    summary, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m retrograde_experiments.data.pack", description=summary)
    parser.add_argument("--data-dir", help="where CIFAR-10 is (default: $RETROGRADE_DATA, or data)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--part-mib", type=int, default=60, help="the most a part may take")
    parser.add_argument("--single", action="store_true", help="one file instead of parts")
    options = parser.parse_args(arguments)
    try:
        images = load("cifar10", options.data_dir)
        with writing(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
            made = (
                [single(images, options.out)] if options.single else parts(images, options.out, options.part_mib << 20)
            )
    except ExperimentError as error:
        sys.exit(str(error))
    for path in made:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
