"""Metrics of one run: a folder with `config.json` and `metrics.jsonl`, one finished unit of work per line.

    {"key": {"net": "resnet", "seed": 0}, "values": {"loss": 0.12, ...}, "run": {"date": ..., "seconds": ..., "hardware": ...}}

`key` says which unit, `values` what came out, `run` when and where: all that may differ between two runs of the same config.
A line is written in one piece and flushed to the disk, so after a kill at any moment the file holds whole lines and at
most one torn one at its end, which is discarded. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ExperimentError

try:
    import fcntl
except ImportError:  # not on Windows: there, do not run two at once in one folder
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS = "config.json", "metrics.jsonl"
Key = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One finished unit."""

    key: Key
    values: dict[str, Any]
    run: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """A value, or a part of the key."""
        return self.values[name] if name in self.values else self.key[name]

    def line(self) -> str:
        return json.dumps({"key": self.key, "values": finite(self.values), "run": self.run}, allow_nan=False)


def named(key: Key) -> str:
    """A key as one string.

    >>> named({"net": "resnet", "seed": 0})
    'net=resnet seed=0'
    """
    return " ".join(f"{name}={value}" for name, value in key.items())


def finite(value: Any) -> Any:
    """The same, with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` holds."""
    path = folder / CONFIG
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExperimentError(f"{path} is missing: this folder holds no run.") from None
    except (ValueError, RecursionError) as error:
        raise ExperimentError(f"{path} is damaged ({error}). Restore it, or use another folder.") from error
    if not isinstance(stored, dict) or not {"experiment", "config", "device"} <= set(stored):
        raise ExperimentError(f"{path} is not the config of a run. Use another folder.")
    return stored


def read_metrics(folder: Path) -> list[Record]:
    """The finished units, in the order they were finished. The file is left as it is.

    Raises:
        ExperimentError: if a line other than a torn last one cannot be read, naming it.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    return _records(path, _whole(path.read_bytes()))


def _whole(data: bytes) -> bytes:
    """Without what follows the last end of line: a line torn by a kill."""
    return data[: data.rfind(b"\n") + 1]


def _records(path: Path, data: bytes) -> list[Record]:
    records: list[Record] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            read = json.loads(line)
            record = Record(read["key"], read["values"], read["run"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ExperimentError(
                f"line {number} of {path} is damaged ({error}). Delete that line to have the unit run again, or use "
                "another folder. Nothing was changed."
            ) from error
        name = named(record.key)
        if name in seen:
            raise ExperimentError(
                f"lines {seen[name]} and {number} of {path} are the same unit ({name}). Delete one of them. Nothing was changed."
            )
        seen[name] = number
        records.append(record)
    return records


class Metrics:
    """The folder of a run, open for adding to it. Use as `with Metrics.open(folder, header) as metrics`."""

    def __init__(self, folder: Path, file: BinaryIO, records: list[Record]) -> None:
        self.folder, self.file, self.records = folder, file, records

    @classmethod
    @contextmanager
    def open(cls, folder: Path, header: dict[str, Any], defaults: dict[str, Any] | None = None) -> Iterator[Metrics]:
        """Begin a run, or go on with one of the same config.

        Args:
            folder: of the run; made if need be.
            header: what `config.json` shall hold: `experiment`, `config` and `device` must agree with what is there.
            defaults: of settings that a run begun before there were such does not name.

        Raises:
            ExperimentError: if the folder holds another run, is damaged, or is in use. It is left as it was.
        """
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / CONFIG).exists():
                _agree(folder, read_config(folder), header, defaults or {})
            elif (folder / METRICS).exists():
                raise ExperimentError(f"{folder} holds metrics without a {CONFIG}. Use another folder.")
            else:
                write_atomic(folder / CONFIG, json.dumps(header, indent=2).encode() + b"\n")
            file = (folder / METRICS).open("a+b")
        with file:
            _lock(file, folder)
            file.seek(0)
            data = file.read()
            whole = _whole(data)
            records = _records(folder / METRICS, whole)
            if len(whole) < len(data):
                file.truncate(len(whole))
            yield cls(folder, file, records)

    def done(self) -> set[str]:
        """The names of the finished units."""
        return {named(record.key) for record in self.records}

    def add(self, record: Record) -> None:
        """Write one finished unit. It is on the disk when this returns."""
        line = (record.line() + "\n").encode()
        end = self.file.seek(0, os.SEEK_END)
        with writing(self.folder / METRICS):
            try:
                self.file.write(line)
                self.file.flush()
                os.fsync(self.file.fileno())
            except OSError:
                os.ftruncate(self.file.fileno(), end)  # a full disk may have taken half a line
                raise
        self.records.append(record)


def _agree(folder: Path, stored: dict[str, Any], wanted: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse to mix two configs in one folder, naming what differs."""
    differ = [
        f"{name} is {stored[name]!r} there and {wanted[name]!r} here"
        for name in ("experiment", "device")
        if stored[name] != wanted[name]
    ]
    there, here = {**defaults, **stored["config"]}, wanted["config"]
    differ += [
        f"{name} is {there.get(name, 'absent')!r} there and {here.get(name, 'absent')!r} here"
        for name in dict.fromkeys([*there, *here])
        if there.get(name, here) != here.get(name, there)
    ]
    if differ:
        raise ExperimentError(
            f"{folder} holds a run of another setting: {'; '.join(differ)}. Use another folder (--out), or delete that "
            "one. Nothing was changed."
        )


def _lock(file: BinaryIO, folder: Path) -> None:
    """Held until the file is closed, by a kill too."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ExperimentError(
            f"another run is writing to {folder}. Wait for it, or use another folder (--out)."
        ) from None


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole, or as it was before."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the disk (full, read-only, no such folder) as an `ExperimentError`."""
    try:
        yield
    except OSError as error:
        raise ExperimentError(
            f"could not write {path}: {error.strerror or error}. What was finished before is kept; {remedy(error)}."
        ) from error


def remedy(error: OSError) -> str:
    """What to do about an error of the disk."""
    todo = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "put that right"
    return f"{todo} and run the same command again to go on"
