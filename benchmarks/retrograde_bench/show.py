"""Results for people: aligned tables, Markdown."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

import retrograde as rg
from retrograde.memory import human

from .methods import BASELINE
from .record import Row, ratio
from .runner import Options, device_name

HEADER = (
    "method",
    "step, ms",
    "quartiles",
    "× time",
    "peak",
    "× memory",
    "without cast",
    "×",
    "B / el. / layer",
    "gradients",
)


def grouped(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by the title of their case."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.title, []).append(row)
    return groups


def line(row: Row, base: Row | None) -> list[str]:
    """The cells of a row; ratios are against the baseline of the same case."""
    if row.status != "ok":
        told = row.status if not row.note else f"{row.status}: {row.note}"
        return [row.method, told, *[""] * (len(HEADER) - 2)]
    base = base or Row("", "", "", "")
    cells = [
        row.method,
        _number(row.median, ".1f"),
        f"{_number(row.lower, '.1f')}–{_number(row.upper, '.1f')}",
        _number(ratio(row.median, base.median), ".3f"),
        _bytes(row.peak),
        _number(ratio(row.peak, base.peak), ".3f"),
        _bytes(row.uncached),
        _number(ratio(row.uncached, base.uncached), ".3f"),
        _number(ratio(row.peak, row.activations), ".2f"),
        row.gradients,
    ]
    if row.budget is not None and row.peak is not None:
        within = "within" if row.peak <= row.budget else "OVER"
        cells[0] += f" ({human(row.budget)}: {within})"
    if row.largest is not None:
        cells[0] += f" (batch {row.largest})"
    return cells


def lines(rows: Sequence[Row]) -> list[list[str]]:
    base = next((row for row in rows if row.method == BASELINE and row.status == "ok"), None)
    return [line(row, base) for row in rows]


def aligned(title: str, rows: Sequence[Row]) -> str:
    """A table in plain text: cells of one column under each other, messages across."""
    table = [list(HEADER), *lines(rows)]
    whole = [cells for cells in table if cells[2]]
    widths = [max(len(cells[i]) for cells in whole) for i in range(len(HEADER))]
    widths[0] = max(len(cells[0]) for cells in table)
    out = [title]
    for cells in table:
        if not cells[2]:
            out.append(f"{cells[0]:<{widths[0]}}  {cells[1]}")
            continue
        rest = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        out.append(f"{cells[0]:<{widths[0]}}  {rest}".rstrip())
    return "\n".join(out)


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the table: with rich if that is here and the output is a terminal."""
    if util.find_spec("rich") is None or not sys.stdout.isatty():
        print(aligned(title, rows), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(HEADER):
        table.add_column(heading, justify="right" if i else "left", no_wrap=i == 0)
    for cells in lines(rows):
        table.add_row(*cells)
    Console().print(table)


def markdown_table(rows: Sequence[Row]) -> list[str]:
    rule = ["---", *["---:"] * (len(HEADER) - 2), "---"]
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in lines(rows)]
    return ["| " + " | ".join(cells) + " |" for cells in [list(HEADER), rule, *escaped]]


def markdown(rows: Sequence[Row], facts: Sequence[dict[str, Any]]) -> str:
    """The results file."""
    day = max((row.date for row in rows), default="")
    out = [f"# Training steps: time and memory, {day}", ""]
    for fact in facts:
        out += [f"- {name}: {value}" for name, value in fact.items()]
    out += [
        "",
        f"Ratios are against `{BASELINE}`, `torch.utils.checkpoint` of every block of the plain network. Peak: memory above "
        "parameters, gradients and batch; \"without cast\": the same with autocast's cache of cast weights off. B / el. / layer: "
        "peak over the elements of x summed over all blocks. Gradients: torch.equal to those of the same network with "
        "memory=\"store\". Methods are explained in docs/benchmark.md.",
    ]  # fmt: skip
    for title, group in grouped(rows).items():
        out += ["", f"## {title}", ""]
        cast = next((row.cast for row in group if row.cast), None)
        if cast:
            out += [f"Weights cast by autocast: {human(cast)}.", ""]
        out += markdown_table(group)
    return "\n".join(out) + "\n"


def facts(options: Options, command: str) -> dict[str, Any]:
    """Hardware, versions, settings, command."""
    device = torch.device(options.device)
    versions = [f"torch {torch.__version__}", f"retrograde {rg.__version__}", f"Python {platform.python_version()}"]
    versions += [
        f"{name} {found}" for name in ("triton", "momentumnet", "revlib", "memcnn") if (found := version(name))
    ]
    if device.type == "cuda":
        versions.append(f"CUDA {torch.version.cuda}")
    tf32 = torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    return {
        "hardware": f"{device_name(device)}; {_processor()}, {os.cpu_count()} cores",
        "versions": ", ".join(versions),
        "settings": f"γ = {options.gamma}; medians of up to {options.repeats} rounds, methods in turns; "
        f"TF32 {'on' if tf32 else 'off'}; allocator {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'as it comes')}",
        "command": f"`{command}`",
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def load_facts(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Those beside the CSVs, without repetition."""
    found: list[dict[str, Any]] = []
    for path in paths:
        beside = path.with_suffix(".json")
        for fact in json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else []:
            if fact not in found:
                found.append(fact)
    return found


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", listed.read_text()) if listed.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _bytes(value: int | None) -> str:
    return "–" if value is None else human(value)
