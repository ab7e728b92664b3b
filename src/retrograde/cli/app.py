"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import demo as demonstration
from . import show

app = typer.Typer(
    help="Train residual networks without storing their activations.", no_args_is_help=True, add_completion=False
)


@app.callback()
def _commands() -> None:
    """Makes typer ask for a command by name, with one command as with several."""


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = demonstration.Setting.epochs,
    depth: Annotated[int, typer.Option(min=1, help="residual blocks")] = demonstration.Setting.depth,
    out: Annotated[Path, typer.Option(help="folder for the figure")] = Path("out"),
    seed: Annotated[int, typer.Option(min=0, help="of the initial weights, the split and the batches")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a look in seconds: few steps of a small network")] = False,
) -> None:
    """Train one residual network three ways on real digits, and compare accuracy, memory and time."""
    setting = demonstration.Setting(epochs=epochs, depth=depth, seed=seed)
    if quick:
        setting = demonstration.quick(setting)
    console = Console()
    console.print(show.opening(setting))
    with show.Progress(console) as progress:
        outcome = demonstration.run(setting, progress)
    console.print(show.table(outcome))
    console.print(show.reading(outcome))
    path = show.figure(outcome, out / "demo.png")
    console.print(f"Figure: {path}", soft_wrap=True, highlight=False)
