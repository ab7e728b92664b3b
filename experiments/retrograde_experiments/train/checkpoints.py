"""Checkpoints of a run: folders that are there whole or not at all.

    step-00001170/
      net.safetensors        parameters and buffers
      average.safetensors    the moving average, if there is one
      state.pt               optimizer, loss scaler, random numbers, fixed-point ranges, position; read with `weights_only=True`
      manifest.json          size and SHA-256 of each file

A checkpoint is written beside its place and moved there by one rename, so a kill at any moment leaves the one before it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from retrograde.extras import require

from ..errors import ExperimentError
from ..metrics import remedy

PREFIX, MANIFEST, STATE = "step-", "manifest.json", "state.pt"
WEIGHTS = ("net", "average")


class Checkpoints:
    """The checkpoints in a folder, the last `keep` of them."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, max(1, keep)

    def all(self) -> list[Path]:
        """From the newest to the oldest."""
        return sorted(self.folder.glob(f"{PREFIX}[0-9]*"), reverse=True)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then delete the oldest.

        Raises:
            ExperimentError: if it cannot be written (a full disk, say). The ones before it are untouched.
        """
        place = self.folder / f"{PREFIX}{step:08d}"
        part = place.with_name(f".{place.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            sizes = {name: _write(part / name, data) for name, data in _files(state).items()}
            _write(part / MANIFEST, json.dumps(sizes, indent=1).encode())
            _sync(part)
            if place.exists():  # of a run that went on from an earlier one
                shutil.rmtree(place)
            os.replace(part, place)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise ExperimentError(
                f"the checkpoint {place} could not be written: {error.strerror or error}. Those before it are untouched; "
                f"{remedy(error)}."
            ) from error
        for left in [*self.all()[self.keep :], *self.folder.glob(f".{PREFIX}*.part")]:
            shutil.rmtree(left, ignore_errors=True)
        return place

    def load(self, chosen: str | Path | None = None) -> dict[str, Any] | None:
        """The state of the newest checkpoint, or of the one given; None if there is none.

        Raises:
            ExperimentError: if it is damaged, naming the newest that is not.
        """
        place = Path(chosen) if chosen else next(iter(self.all()), None)
        if place is None:
            return None
        fault = damage(place)
        if fault is None:
            return read(place)
        good = next((p for p in self.all() if p != place and damage(p) is None), None)
        advice = (
            f"The newest that is whole is {good}: go on from it with --resume {good}"
            if good
            else "There is no other: delete it to begin anew"
        )
        raise ExperimentError(f"the checkpoint {place} is damaged: {fault}. {advice}. Nothing was changed.")


def damage(place: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest: dict[str, list[Any]] = json.loads((place / MANIFEST).read_text())
        for name, (size, digest) in manifest.items():
            data = (place / name).read_bytes()
            if len(data) != size:
                return f"{name} has {len(data)} bytes of {size}"
            if hashlib.sha256(data).hexdigest() != digest:
                return f"the SHA-256 of {name} differs from the one in {MANIFEST}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None if {f"{WEIGHTS[0]}.safetensors", STATE} <= manifest.keys() else f"{MANIFEST} does not list its files"


def read(place: Path) -> dict[str, Any]:
    """The state in a checkpoint that is whole."""
    load_file = require("safetensors.torch").load_file
    state = torch.load(place / STATE, map_location="cpu", weights_only=True)
    for name in WEIGHTS:
        if (place / f"{name}.safetensors").exists():
            state[name] = load_file(place / f"{name}.safetensors")
    return state


def _files(state: dict[str, Any]) -> dict[str, bytes]:
    save, data = require("safetensors.torch").save, io.BytesIO()
    torch.save({name: value for name, value in state.items() if name not in WEIGHTS}, data)
    weights = {name: {k: t.contiguous() for k, t in state[name].items()} for name in WEIGHTS if name in state}
    return {**{f"{name}.safetensors": save(tensors) for name, tensors in weights.items()}, STATE: data.getvalue()}


def _write(path: Path, data: bytes) -> list[Any]:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return [len(data), hashlib.sha256(data).hexdigest()]


def _sync(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
