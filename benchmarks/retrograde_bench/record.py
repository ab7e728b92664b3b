"""A row of the results, and the CSV they are kept in: appended row by row, so that a run that is killed loses nothing."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Row:
    """One method on one case. Bytes and milliseconds; None where there is no figure.

    Attributes:
        status: "ok", "out of memory", "raised", "not run".
        median, lower, upper, best: of the step's times; lower and upper are the quartiles.
        peak: memory above parameters, gradients and batch; `uncached`: the same with autocast's cache of cast weights off.
        cast: bytes of all weights that autocast casts.
        activations: elements of x summed over the blocks of all stacks.
        gradients: how the check against the twin went (ours).
        budget: what `budget=` was given.
        largest: the largest batch found for `limit` bytes in all (parameters, gradients and batch included).
        note: what was raised, or what else there is to know.
    """

    case: str
    title: str
    method: str
    status: str
    median: float | None = None
    lower: float | None = None
    upper: float | None = None
    best: float | None = None
    repeats: int = 0
    peak: int | None = None
    uncached: int | None = None
    cast: int | None = None
    activations: int | None = None
    gradients: str = ""
    budget: int | None = None
    largest: int | None = None
    limit: int | None = None
    note: str = ""
    device: str = ""
    torch: str = ""
    date: str = ""


_NAMES = [field.name for field in fields(Row)]
_KINDS = {
    name: next((t for t in get_args(hint) if t is not NoneType), hint) for name, hint in get_type_hints(Row).items()
}


def append(path: Path, row: Row) -> None:
    """Add a row to the file, with a header if it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _NAMES)
        if new:
            writer.writeheader()
        writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of several files. A later measurement of a case by a method replaces an earlier one, in its place.

    Raises:
        ValueError: for a file that is not a CSV of these rows.
    """
    rows: dict[tuple[str, str], Row] = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != _NAMES:
                raise ValueError(
                    f"{path} does not hold results of this benchmark: its columns are {reader.fieldnames}."
                )
            for found in reader:
                row = Row(**{name: _parsed(name, text) for name, text in found.items()})
                rows[row.case, row.method] = row
    return list(rows.values())


def write(path: Path, rows: Sequence[Row]) -> None:
    path.unlink(missing_ok=True)
    for row in rows:
        append(path, row)


def _parsed(name: str, text: str) -> Any:
    kind = _KINDS[name]
    return text if kind is str else kind(text) if text else None


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
