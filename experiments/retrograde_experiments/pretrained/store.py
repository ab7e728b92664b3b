"""The metrics of one experiment: a file of JSON lines, the setting first, then one finished unit each.

    {"experiment": "cifar", "device": "cuda", "config": {...}}
    {"key": {"net": "ResNet-20", "way": "refit", ...}, "values": {"accuracy": 91.2, ...}, "run": {"date": ..., "seconds": ...}}

A line is flushed to the disk when its unit is finished; a last line torn by a kill is dropped. One file takes one setting; but the
memory mode, which changes no result, may be another from one start to the next, and a later start may add what it is tried on.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import ExperimentError
from ..metrics import Key, Record, named, write_atomic, writing

FREE = ("memory", "ways", "tasks", "nets")
"""Settings that change no result: the others than `memory` add units."""


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """The setting of a file, and its finished units.

    Raises:
        ExperimentError: if there is no such file, or a line other than a torn last one cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ExperimentError(f"{path} does not exist: that experiment has not been run.") from None
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    try:
        header = json.loads(lines[0])
        records = [Record(held["key"], held["values"], held["run"]) for held in map(json.loads, lines[1:])]
        header["experiment"], header["config"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ExperimentError(
            f"{path} is damaged ({type(error).__name__}: {error}). Use another folder (--out)."
        ) from error
    return header, records


def _fixed(part: Any) -> Any:
    """A part of a header, without what is free."""
    return {name: value for name, value in part.items() if name not in FREE} if isinstance(part, dict) else part


class Store:
    """A file of metrics, to be added to.

    Args:
        path: of the file; begun if it does not exist.
        header: the setting: must agree with what the file has.

    Raises:
        ExperimentError: if the file holds another setting or is damaged. It is left as it was.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        if path.exists():
            stored, self.records = read(path)
            differ = [name for name in header if _fixed(stored.get(name)) != _fixed(header[name])]
            if differ:
                changed = "; ".join(f"{name} is {stored.get(name)} there and {header[name]} here" for name in differ)
                raise ExperimentError(f"{path} holds a run of another setting: {changed}. Use another folder (--out).")
            for name in set(FREE[1:]) & header["config"].keys():
                before = stored["config"].get(name, ["kept"] if name == "ways" else [])
                stored["config"][name] = list(dict.fromkeys([*before, *header["config"][name]]))
            lines = [json.dumps(stored), *(record.line() for record in self.records)]
        else:
            self.records, lines = [], [json.dumps(header)]
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, "".join(f"{line}\n" for line in lines).encode())

    def done(self, unit: Key) -> bool:
        return any(named(record.key) == named(unit) for record in self.records)

    def add(self, record: Record) -> None:
        """Write a finished unit. It is on the disk when this returns."""
        with writing(self.path), self.path.open("ab") as file:
            file.write((record.line() + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
