"""A checkpoint of one unit of work that takes long: written whole or not at all, read with `weights_only=True`.

    state = checkpoint.load()            # None at the first start
    ...
    checkpoint.save({"step": step, "model": net.state_dict(), "optimizer": ..., "rng": torch.get_rng_state(), "curve": [...]})

What is saved must suffice to go on to the same bits. The fixed-point range of a momentum network follows its activations
and is no part of its state_dict: `state_of` and `restore` take it along. The file is deleted when the unit's metrics are on
the disk.
"""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import retrograde as rg

from .errors import ExperimentError
from .metrics import write_atomic, writing
from .private import every_range, put_back, written

FOLDER = "checkpoints"


class Checkpoint:
    """Where one unit's state is kept between a kill and the next start.

    Args:
        path: of the file.
        every: seconds between two states that `due` asks for.
    """

    def __init__(self, path: Path, every: float = 20.0) -> None:
        self.path, self.every = path, every
        self._begun = self._saved = time.monotonic()

    def due(self) -> bool:
        """Whether the last state is long enough ago that another is worth the time."""
        return time.monotonic() - self._saved >= self.every

    def seconds(self) -> float:
        """Spent on the unit so far, those before an interruption included."""
        return time.monotonic() - self._begun

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state, of tensors, numbers, strings, lists and dicts, in place of the last."""
        data = io.BytesIO()
        torch.save({"state": state, "seconds": self.seconds()}, data)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, data.getvalue())
        self._saved = time.monotonic()

    def load(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The last state, or None.

        Raises:
            ExperimentError: if the file cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            held = torch.load(self.path, map_location=device, weights_only=True)
            state, seconds = held["state"], held["seconds"]
        except Exception as error:  # torch raises many kinds for a damaged file
            raise ExperimentError(
                f"the checkpoint {self.path} is damaged ({type(error).__name__}: {error}). Delete it to begin this unit "
                "anew; finished units are kept."
            ) from error
        self._begun -= seconds
        return state

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def state_of(net: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and fixed-point ranges, for `save`."""
    rg.settle(net)  # on an accelerator the last passes may not have been looked at yet
    return {"parameters": net.state_dict(), "ranges": written(every_range(net))}


def restore(net: nn.Module, state: dict[str, Any]) -> None:
    """The inverse of `state_of`: what the network computes from here on has the bits of the one that was saved."""
    net.load_state_dict(state["parameters"])
    put_back(every_range(net), state["ranges"])
