"""What a run writes while it trains: `log.jsonl`, TensorBoard's files, and a live line on the terminal.

    {"step": 390, "epoch": 1, "loss": 1.42, "rate": 0.01, "run": {"seconds": 8.1, "images_per_second": 6100, "peak_bytes": ...}}

All outside of `run` is the same for the same setting, interrupted or not: a checkpoint knows how long the log was, and a
run that goes on from it cuts off what came after.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from retrograde.extras import require

from ..metrics import finite, writing
from ..private import human

LOG = "log.jsonl"


class Log:
    """The log of a run, from its byte number `length` on."""

    def __init__(self, folder: Path, length: int, step: int, tensorboard: bool) -> None:
        self.path, self.board = folder / LOG, None
        if tensorboard:
            require("tensorboard")  # or an error that says how to get it
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        with writing(self.path):
            self.file = self.path.open("ab")
            self.file.truncate(length)
            self.file.seek(0, os.SEEK_END)

    def add(self, step: int, values: dict[str, Any], run: dict[str, Any]) -> None:
        line = json.dumps({"step": step, **finite(values), "run": finite(run)}, allow_nan=False)
        with writing(self.path):
            self.file.write(line.encode() + b"\n")
            self.file.flush()
        if self.board is not None:
            for name, value in {**values, **run}.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(name, value, step)

    def length(self) -> int:
        """Bytes so far, all of them on the disk."""
        with writing(self.path):
            os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log; one torn by a kill is left out."""
    whole, _, _ = (folder / LOG).read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def peak_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, resident of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Line:
    """The live line: epoch, loss, accuracy, images per second, peak memory. Plain lines, one an epoch, without a terminal."""

    def __init__(self, steps: int, epochs: int, done: int, shown: bool = True) -> None:
        self.steps, self.epochs, self.accuracy = steps, epochs, float("nan")
        self.bar: Any = None
        self.shown = shown
        if shown and sys.stderr.isatty() and find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                console=Console(stderr=True), refresh_per_second=4,
            )  # fmt: skip
            self.task = self.bar.add_task("", total=steps * epochs, completed=done, note="")
            self.bar.start()

    def update(self, step: int, loss: float, speed: float, peak: int, accuracy: float | None = None) -> None:
        if not self.shown:
            return
        self.accuracy = self.accuracy if accuracy is None else accuracy
        epoch = -(-step // self.steps)
        note = f"loss {loss:.3f} · test {self.accuracy:.2f} % · {speed:,.0f} images/s · peak {human(peak)}"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=f"epoch {epoch}/{self.epochs}", note=note)
        elif accuracy is not None:
            print(f"epoch {epoch}/{self.epochs} · {note}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


class Clock:
    """Seconds of training, those before an interruption included, and the speed since last asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.start = time.perf_counter() - seconds
        self.mark = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        last, self.mark = self.mark, now
        return now - last
