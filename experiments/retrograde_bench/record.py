"""A row of the results, and the one table they are kept in. It grows by rows: a run that is killed loses nothing."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "table.csv"


@dataclass(frozen=True)
class Row:
    """One method on one case. Bytes and milliseconds; None where there is no figure.

    Attributes:
        commit: of the code that was measured; "+" behind it: with changes. Empty where nobody wrote it down.
        device: that was measured; `host`: the processor beside it.
        versions, settings, command: of the run.
        case, title: the network, by its short name and for people.
        method: as it is written, see `notation`.
        status: "ok", "out of memory", "raised", "not run".
        median, lower, upper, best: of the step's times; lower and upper are the quartiles.
        time_ratio, memory_ratio: median and peak over those of `checkpoint` in the same run.
        peak: memory above parameters, gradients and batch at the highest point; `uncached`: the same without autocast's cache
            of cast weights; `held`: what forward keeps for backward.
        predicted, predicted_held: what `rg.plan` says of peak and held.
        resident: growth of the resident memory of a fresh process, as the system counts it.
        cast: bytes of all weights that autocast casts.
        activations: elements of x summed over the blocks of all stacks.
        gradients: how the check against the twin went (ours).
        budget: what the method was given.
        largest: the largest batch found for `limit` bytes in all (parameters, gradients and batch included).
        note: what was raised, or what else there is to know.
    """

    commit: str = ""
    date: str = ""
    device: str = ""
    host: str = ""
    versions: str = ""
    settings: str = ""
    command: str = ""
    case: str = ""
    title: str = ""
    method: str = ""
    status: str = "ok"
    median: float | None = None
    lower: float | None = None
    upper: float | None = None
    best: float | None = None
    repeats: int = 0
    time_ratio: float | None = None
    peak: int | None = None
    memory_ratio: float | None = None
    uncached: int | None = None
    held: int | None = None
    predicted: int | None = None
    predicted_held: int | None = None
    resident: int | None = None
    cast: int | None = None
    activations: int | None = None
    gradients: str = ""
    budget: int | None = None
    largest: int | None = None
    limit: int | None = None
    note: str = ""


_NAMES = [field.name for field in fields(Row)]
_KINDS = {
    name: next((t for t in get_args(hint) if t is not NoneType), hint) for name, hint in get_type_hints(Row).items()
}


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to the table, with a header if it is new.

    Raises:
        ValueError: for a file that is not a table of these rows. Nothing is written.
    """
    new = not path.exists()
    if not new:
        _check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _NAMES, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({name: _written(value) for name, value in asdict(row).items()})


def read(path: Path) -> list[Row]:
    """All rows of a table, oldest first.

    Raises:
        ValueError: for a file that is not a table of these rows.
    """
    _check(path)
    with path.open(newline="", encoding="utf-8") as file:
        return [Row(**{name: _parsed(name, text) for name, text in found.items()}) for found in csv.DictReader(file)]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of each case and method the last measurement that gave a result; where none did, the last.

    >>> [row.peak for row in latest([Row(case="a", peak=1), Row(case="a", peak=2), Row(case="a", status="raised")])]
    [2]
    """
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        before = found.get((row.case, row.method))
        if before is None or row.status == "ok" or before.status != "ok":
            found[row.case, row.method] = row
    return list(found.values())


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the title of their case."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.title, []).append(row)
    return groups


def _check(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        names = csv.DictReader(file).fieldnames
    if names != _NAMES:
        raise ValueError(f"{path} is no table of this benchmark: its columns are {names}.")


def _written(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


def _parsed(name: str, text: str) -> Any:
    kind = _KINDS[name]
    return text if kind is str else kind(text) if text else None
