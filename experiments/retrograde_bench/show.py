"""Results for people: aligned tables, Markdown; and what is known of a run."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

import retrograde as rg
from retrograde_experiments.private import human

from .record import ROOT, Row, ratio
from .runner import Options, device_name

NONE = "–"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _bytes(value: int | None) -> str:
    return NONE if value is None else human(value)


def _name(row: Row) -> str:
    found = row.method
    if row.budget is not None and row.peak is not None:
        found += f" ({human(row.budget)}: {'within' if row.peak <= row.budget else 'OVER'})"
    if row.largest is not None:
        found += f" (batch {row.largest})"
    return found


def _quartiles(row: Row) -> str:
    return NONE if row.lower is None else f"{row.lower:.1f} to {row.upper:.1f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": _name,
    "step, ms": lambda row: _number(row.median, ".1f"),
    "quartiles": _quartiles,
    "× time": lambda row: _number(row.time_ratio, ".3f"),
    "peak": lambda row: _bytes(row.peak),
    "× memory": lambda row: _number(row.memory_ratio, ".3f"),
    "predicted": lambda row: _bytes(row.predicted),
    "without cast": lambda row: _bytes(row.uncached) if row.cast else NONE,
    "held": lambda row: _bytes(row.held),
    "resident": lambda row: _bytes(row.resident),
    "B / el. / layer": lambda row: _number(ratio(row.peak, row.activations), ".2f"),
    "gradients": lambda row: row.gradients or NONE,
    "commit": lambda row: row.commit or NONE,
}


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Header and cells. A column that no row has anything for is left out. A row without figures has its message in the second cell."""
    measured = [row for row in rows if row.status == "ok"]
    shown = {
        name: cell for name, cell in COLUMNS.items() if name == "method" or any(cell(row) != NONE for row in measured)
    }
    table = [list(shown)]
    for row in rows:
        if row.status == "ok":
            table.append([cell(row) for cell in shown.values()])
        else:
            told = f"{row.status}: {row.note}" if row.note else row.status
            table.append([row.method, told, *[""] * (len(shown) - 2)][: max(2, len(shown))])
    return table


def aligned(title: str, rows: Sequence[Row]) -> str:
    """A table in plain text: cells of one column under each other, messages across."""
    table = lines(rows)
    across = [row.status != "ok" for row in rows]
    whole = [table[0], *(cells for cells, message in zip(table[1:], across, strict=True) if not message)]
    widths = [max(len(cells[i]) for cells in whole) for i in range(len(table[0]))]
    widths[0] = max(len(cells[0]) for cells in table)
    out = [title]
    for cells, message in zip(table, [False, *across], strict=True):
        if message:
            out.append(f"{cells[0]:<{widths[0]}}  {cells[1]}")
            continue
        rest = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        out.append(f"{cells[0]:<{widths[0]}}  {rest}".rstrip())
    return "\n".join(out)


def markdown_table(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table: names to the left, figures to the right."""
    head, *rest = table
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in [head, rule, *rest]]


def facts(options: Options, command: str) -> Row:
    """A row with what is known of a run before it begins."""
    device = torch.device(options.device)
    versions = [f"torch {torch.__version__}", f"retrograde {rg.__version__}", f"Python {platform.python_version()}"]
    versions += [
        f"{name} {found}" for name in ("triton", "momentumnet", "revlib", "memcnn") if (found := version(name))
    ]
    if device.type == "cuda":
        versions.append(f"CUDA {torch.version.cuda}")
    tf32 = torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    settings = (
        f"γ = {options.gamma}; up to {options.repeats} rounds, methods in turns; {torch.get_num_threads()} threads; "
    )
    settings += f"TF32 {'on' if tf32 else 'off'}; allocator {os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'as it comes')}"
    return Row(
        commit=commit(), date=datetime.date.today().isoformat(), device=device_name(device),
        host=f"{_processor()}, {os.cpu_count()} cores", versions=", ".join(versions), settings=settings, command=command,
    )  # fmt: skip


def commit() -> str:
    """Of the checkout this runs in, with "+" where it holds changes; "" outside of one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", listed.read_text()) if listed.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
