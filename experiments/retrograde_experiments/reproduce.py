"""`retrograde reproduce NAME`: one experiment of the paper, run or resumed, with its figure and what came out."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .config import override, preset
from .errors import ExperimentError
from .progress import Shown
from .registry import MODULES, about, load
from .report import found_results, write
from .run import FIGURE, reproduce


def command(name: str, preset_name: str, assignments: list[str], device: str) -> str:
    """The command that repeats a run."""
    parts = ["retrograde", "reproduce", name, "--preset", preset_name]
    parts += [part for assignment in assignments for part in ("--set", assignment)]
    parts += ["--device", device] if device != "cpu" else []
    return shlex.join(parts)


def run(console: Console, name: str, preset_name: str, out: Path | None, assignments: list[str], device: str) -> None:
    """Run, or go on with, one experiment; show the bars, then the findings."""
    experiment = load(name)
    config = override(preset(experiment.Config, preset_name), assignments)
    folder = out or Path("out") / "results" / preset_name / name
    console.print(Text.assemble((f"{name}. ", "bold"), config.setting()))
    with Shown(console) as progress:
        records = reproduce(
            name, config, folder, progress, device=device, preset=preset_name,
            command=command(name, preset_name, assignments, device),
        )  # fmt: skip
    console.print(findings(name, config, records, judged=preset_name != "smoke"))
    if preset_name == "smoke":
        console.print("Smoke runs are too short to be held against the paper: --preset default or paper is.")
    console.print(f"Figure: {folder / FIGURE}", soft_wrap=True, highlight=False)


def findings(name: str, config: object, records: list, judged: bool = True) -> Table:
    """What came out; and if that is to be judged, what should."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "ours", "should be", "") if judged else ("", "ours"):
        shown.add_column(heading)
    marks = {True: "yes", False: "NO", None: ""}
    for found in load(name).findings(config, records):
        target = (found.target, marks[found.met]) if judged else ()
        shown.add_row(found.what, found.ours, *target)
    return shown


def listing() -> Table:
    """The experiments there are."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("name", no_wrap=True)
    shown.add_column("what it shows")
    for name in MODULES:
        shown.add_row(name, about(name))
    return shown


def main(name: str, preset_name: str, out: Path | None, assignments: list[str], device: str, show_list: bool) -> None:
    """The command: errors of a run as one line."""
    console = Console()
    if show_list or not name:
        console.print(listing())
        return
    try:
        run(console, name, preset_name, out, assignments, device)
    except ExperimentError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.")
        raise SystemExit(130) from None


def write_report(out: Path, results: Path | None) -> None:
    """The command `report`: errors as one line."""
    try:
        written = write(out, *([results] if results else found_results()))
    except ExperimentError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None
    Console().print(f"Written: {written[0]}, {written[1]}", soft_wrap=True, highlight=False)
