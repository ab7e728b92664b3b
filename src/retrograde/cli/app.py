"""The commands and their options."""

from __future__ import annotations

from importlib.metadata import entry_points
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


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="of torchvision, timm, transformers, or module:function giving model (and example)")],
    batch: Annotated[int, typer.Option(min=1, help="how many inputs a step takes")] = 32,
    size: Annotated[int | None, typer.Option(min=1, help="pixels of an image's side, or tokens of a text")] = None,
    gamma: Annotated[float, typer.Option(min=0, max=1)] = 0.9,
    budget: Annotated[str, typer.Option(help="memory to fit into, as 24GB: shows the largest batch each way")] = "",
    amp: Annotated[str, typer.Option(help="mixed precision: bf16 or fp16")] = "",
    optimizer: Annotated[str, typer.Option(help="whose state to count: none, sgd (with momentum) or adam")] = "none",
    stages: Annotated[list[str] | None, typer.Option("--stage", help="a path or pattern; may be repeated")] = None,
) -> None:  # fmt: skip
    """Show what would be converted in a model, and the memory of a training step each way, predicted."""
    from . import plan as planning

    for name, value, allowed in (("amp", amp, planning.AMP), ("optimizer", optimizer, planning.OPTIMIZERS)):
        if value not in allowed:
            raise typer.BadParameter(
                f"must be one of {', '.join(filter(None, allowed))}; got {value!r}.", param_hint=f"--{name}"
            )
    try:
        planning.main(model, batch, size, gamma, budget, amp, optimizer, stages or [])
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None


for _command in entry_points(group="retrograde.commands"):
    _command.load()(app)
