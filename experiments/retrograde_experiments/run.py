"""One run of one experiment: its units one after the other, each a line of metrics, then the figure from the metrics.

Killed at any moment and started again with the same command, it goes on where it was and ends with the same metrics.
"""

from __future__ import annotations

import datetime
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import retrograde

from .checkpoint import FOLDER, Checkpoint
from .config import from_json, to_json
from .errors import ExperimentError
from .hardware import hardware
from .metrics import Key, Metrics, Record, named, read_config, read_metrics, write_atomic, writing
from .progress import Progress
from .style import styled

if TYPE_CHECKING:
    from .registry import Experiment

FIGURE = "figure.png"


@dataclass(frozen=True)
class Context:
    """What `measure` is given besides config and unit.

    Attributes:
        device: where to compute.
        progress: tell it `steps(total)` and `step()`.
        checkpoint: of this unit, for work that takes long.
        folder: of the run, for files that later units need (weights, say). Not for results.
    """

    device: torch.device
    progress: Progress
    checkpoint: Checkpoint
    folder: Path


def reproduce(
    name: str, config: Any, out: Path, progress: Progress, *,
    device: str = "cpu", preset: str = "", command: str = "", every: float | None = None,
) -> list[Record]:  # fmt: skip
    """Run an experiment to its end, or on to its end, and draw its figure.

    Args:
        name: of the experiment.
        config: its config.
        out: folder of the run.
        progress: is told how it goes.
        device: where to compute.
        preset, command: kept in `config.json` for the report.
        every: seconds between checkpoints of a unit; None for the environment's RETROGRADE_CHECKPOINT_SECONDS, or 20.

    Raises:
        ExperimentError: with what to do. What was finished before is untouched.
    """
    from .registry import load

    experiment, where = load(name), available(device)
    header = {
        "experiment": name, "device": where.type, "preset": preset, "command": command, "config": to_json(config),
    }  # fmt: skip
    units = experiment.units(config)
    with Metrics.open(out, header) as metrics:
        done = metrics.done()
        todo = [unit for unit in units if named(unit) not in done]
        progress.planned(len(units), len(units) - len(todo))
        checkpoints = {named(unit): _checkpoint(out, unit, every) for unit in units}
        for finished in done & checkpoints.keys():
            checkpoints[finished].delete()  # killed between the line and this
        for unit in todo:
            progress.unit(named(unit))
            start, checkpoint = time.perf_counter(), checkpoints[named(unit)]
            values = experiment.measure(config, unit, Context(where, progress, checkpoint, out))
            metrics.add(Record(unit, values, _when_and_where(device, time.perf_counter() - start)))
            checkpoint.delete()
            progress.finished()
    draw(out)
    return read_metrics(out)


def draw(out: Path) -> Path:
    """Draw the figure of a run, from its folder alone."""
    from .registry import load

    stored, records = read_config(out), read_metrics(out)
    experiment = load(stored["experiment"])
    if not records:
        raise ExperimentError(f"{out} has no finished unit to draw.")
    config, drawn = from_json(experiment.Config, stored["config"]), io.BytesIO()
    with styled():
        experiment.figure(config, records).savefig(drawn, dpi=150, format="png", metadata={"Software": None})
    with writing(out / FIGURE):
        write_atomic(out / FIGURE, drawn.getvalue())
    return out / FIGURE


def complete(experiment: Experiment, config: Any, records: list[Record]) -> tuple[int, int]:
    """How many units are finished, of how many."""
    wanted = {named(unit) for unit in experiment.units(config)}
    return len(wanted & {named(record.key) for record in records}), len(wanted)


def available(device: str) -> torch.device:
    """The device, if it is there."""
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ExperimentError(f"there is no device {device!r}: give cpu, cuda or cuda:N.") from None
    if where.type not in ("cpu", "cuda"):
        raise ExperimentError(f"experiments run on cpu or cuda; got {device!r}.")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ExperimentError(f"{device!r} is not on this machine: it has {torch.cuda.device_count()} CUDA devices.")
    return where


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: networks this small only lose with more, and sums keep their order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _checkpoint(out: Path, unit: Key, every: float | None) -> Checkpoint:
    name = "".join(c if c.isalnum() or c in "=.-" else "_" for c in named(unit))
    if every is None:
        every = float(os.environ.get("RETROGRADE_CHECKPOINT_SECONDS", "20"))
    return Checkpoint(out / FOLDER / f"{name}.pt", every)


def _when_and_where(device: str, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(), "seconds": round(seconds, 3), "hardware": hardware(device),
        "torch": torch.__version__, "retrograde": retrograde.__version__,
    }  # fmt: skip
