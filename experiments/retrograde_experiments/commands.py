"""What `retrograde` gains when this distribution is installed: `train`, `reproduce`, `report`.

`pyproject.toml` names these functions in the group `retrograde.commands`. The command line of the library loads each and calls it
with its typer app. Nothing that takes time to import is imported before a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(app: typer.Typer) -> None:
    """Register `retrograde train`, which hands its options to the trainer, whose settings they are."""

    @app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def train(context: typer.Context) -> None:
        """Train a residual network on images, plain or with momentum; the same command goes on with an interrupted run."""
        from .train.run import main

        main(context.args)


def reproduce(app: typer.Typer) -> None:
    """Register `retrograde reproduce`."""

    @app.command()
    def reproduce(
        name: Annotated[str, typer.Argument(help="of the experiment; see --list")] = "",
        preset: Annotated[str, typer.Option(help="smoke (seconds), default (minutes) or paper (the paper's setting)")] = "default",
        out: Annotated[Path | None, typer.Option(help="folder of the run  [default: out/results/PRESET/NAME]")] = None,
        changes: Annotated[list[str] | None, typer.Option("--set", help="a setting to change, as key=value; may be repeated")] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N")] = "cpu",
        show_list: Annotated[bool, typer.Option("--list", help="name the experiments")] = False,
    ) -> None:  # fmt: skip
        """Run one figure or table of the paper, or go on with it, and draw it from its metrics."""
        from .reproduce import main

        main(name, preset, out, changes or [], device, show_list)


def report(app: typer.Typer) -> None:
    """Register `retrograde report`."""

    @app.command()
    def report(
        out: Annotated[Path, typer.Option(help="the page; a Markdown one of the same name is written beside it")] = Path("report.html"),
        results: Annotated[Path | None, typer.Option(help="folder of runs  [default: out/results/*, the repository's]")] = None,
    ) -> None:  # fmt: skip
        """Write one page with every experiment: the paper's number, ours, setting, figure, command, date and hardware."""
        from .reproduce import write_report

        write_report(out, results)
