"""`retrograde report`: the paper's numbers beside ours, from the metrics of finished runs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.report import default_results, write


def main(out: Path, results: Path | None) -> None:
    """The command: errors as one line."""
    try:
        written = write(out, results or default_results())
    except ExperimentError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None
    Console().print(f"Written: {written[0]}, {written[1]}", soft_wrap=True, highlight=False)
