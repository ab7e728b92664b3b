"""One run of one experiment: its units one after the other, each a line of metrics, then the figure from the metrics.

Killed at any moment and started again with the same command, it goes on where it was and ends with the same metrics. Units may
also run several at a time, in processes that share the device (`jobs`): small networks keep a GPU busy for a fraction of the time.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import retrograde

from .checkpoint import FOLDER, Checkpoint
from .config import from_json, to_json
from .errors import ExperimentError
from .hardware import commit, hardware
from .metrics import Key, Metrics, Record, named, read_config, read_metrics, write_atomic, writing
from .progress import Lines, Progress
from .style import save, styled

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
    device: str = "cpu", preset: str = "", command: str = "", every: float | None = None, jobs: int = 1,
    only: Mapping[str, str] | None = None, seconds: float | None = None,
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
        jobs: units at a time, each in a process of its own. What is measured must not be time, nor all of a device's memory.
        only: units whose key has these values, and no others.
        seconds: begin no unit after so long.

    Raises:
        ExperimentError: with what to do. What was finished before is untouched.
    """
    from .registry import load

    experiment, where = load(name), available(device)
    header = {
        "experiment": name, "device": where.type, "preset": preset, "command": command, "config": to_json(config),
    }  # fmt: skip
    units = experiment.units(config)
    chosen = [unit for unit in units if all(str(unit.get(key)) == value for key, value in (only or {}).items())]
    if not chosen:
        raise ExperimentError(f"no unit has {dict(only or {})}. One of the {len(units)} there are: {named(units[0])}.")
    begun = time.perf_counter()
    with Metrics.open(out, header, to_json(type(config)())) as metrics:
        done = metrics.done()
        todo = [unit for unit in chosen if named(unit) not in done]
        progress.planned(len(chosen), len(chosen) - len(todo))
        for unit in units:
            if named(unit) in done:
                _checkpoint(out, unit, every).delete()  # killed between the line and this

        def late() -> bool:
            return seconds is not None and time.perf_counter() - begun > seconds

        def keep(unit: Key, values: dict[str, Any], took: float) -> None:
            metrics.add(Record(unit, values, when_and_where(device, took)))
            _checkpoint(out, unit, every).delete()
            progress.finished()

        task = _Task(name, to_json(config), str(out), device, every)
        if jobs > 1:
            own: Callable[[Any, Key], list[Key]] = getattr(experiment, "needs", lambda config, unit: [])
            side_by_side(
                task.alone, todo, jobs, late=late, keep=keep, begin=progress.unit, needs=lambda unit: own(config, unit)
            )
        else:
            for unit in todo:
                if not late():
                    progress.unit(named(unit))
                    keep(unit, *task.work(unit, progress))
    if (
        find_spec("matplotlib") is not None
    ):  # a machine lent for computing may not have it: the same command draws elsewhere
        draw(out)
    return read_metrics(out)


@dataclass(frozen=True)
class _Task:
    """What a process must know to do a unit."""

    name: str
    config: dict[str, Any]
    out: str
    device: str
    every: float | None

    def work(self, unit: Key, progress: Progress) -> tuple[dict[str, Any], float]:
        """The values of a unit, and the seconds it took."""
        from .registry import load

        experiment, out = load(self.name), Path(self.out)
        context = Context(available(self.device), progress, _checkpoint(out, unit, self.every), out)
        values = experiment.measure(from_json(experiment.Config, self.config), unit, context)
        return values, context.checkpoint.seconds()

    def alone(self, unit: Key) -> tuple[dict[str, Any], float]:
        """`work` in a process of a pool."""
        torch.set_num_threads(1)
        progress = Lines()
        progress.unit(named(unit))
        return self.work(unit, progress)


def side_by_side(
    work: Callable[[Key], tuple[dict[str, Any], float]], todo: list[Key], jobs: int, *, late: Callable[[], bool],
    keep: Callable[[Key, dict[str, Any], float], None], begin: Callable[[str], None] = lambda name: None,
    needs: Callable[[Key], list[Key]] = lambda unit: [],
) -> None:  # fmt: skip
    """The units in a pool of processes, each once those it `needs` are finished. One that fails does not stop the others.

    Raises:
        ExperimentError: at the end, with what failed.
    """
    unfinished, waiting = {named(unit) for unit in todo}, list(todo)
    running: dict[Future[tuple[dict[str, Any], float]], Key] = {}
    failed: list[tuple[Key, BaseException]] = []
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn")
    ) as pool:  # CUDA does not survive a fork
        while True:
            free = [u for u in waiting if not unfinished & {named(needed) for needed in needs(u)}]
            for unit in free[: jobs - len(running)]:
                if not late():
                    begin(named(unit))
                    waiting.remove(unit)
                    running[pool.submit(work, unit)] = unit
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, error = running.pop(future), future.exception()
                if error is None:
                    unfinished.remove(named(unit))
                    keep(unit, *future.result())
                else:
                    failed.append((unit, error))
    if failed:
        told = "; ".join(f"{named(unit)}: {type(error).__name__}: {error}" for unit, error in failed)
        raise ExperimentError(f"{len(failed)} of {len(todo)} units failed. {told}") from failed[0][1]


def draw(out: Path) -> Path:
    """Draw the figure of a run, from its folder alone."""
    from .registry import load

    stored, records = read_config(out), read_metrics(out)
    experiment = load(stored["experiment"])
    if not records:
        raise ExperimentError(f"{out} has no finished unit to draw.")
    config = from_json(experiment.Config, stored["config"])
    with styled():
        drawn = save(experiment.figure(config, records), Path(FIGURE).stem)
    for name, data in drawn.items():
        with writing(out / name):
            write_atomic(out / name, data)
    return out / FIGURE


def complete(experiment: Experiment, config: Any, records: list[Record]) -> tuple[int, int]:
    """How many units are finished, of how many."""
    wanted = {named(unit) for unit in experiment.units(config)}
    return len(wanted & {named(record.key) for record in records}), len(wanted)


def missing(experiment: Experiment, config: Any, records: list[Record]) -> tuple[str, ...]:
    """The units that are not finished, by name."""
    there = {named(record.key) for record in records}
    return tuple(name for unit in experiment.units(config) if (name := named(unit)) not in there)


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


def when_and_where(device: str, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(), "seconds": round(seconds, 3), "hardware": hardware(device),
        "torch": torch.__version__, "retrograde": retrograde.__version__, "commit": commit(),
    }  # fmt: skip
