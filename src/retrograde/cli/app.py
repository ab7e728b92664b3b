"""The commands and their options.

`demo` and `plan` are here. Another distribution adds a command by an entry point in the group `retrograde.commands`: a function
that is called with the typer app and registers the command on it. `retrograde-experiments` adds `train`, `reproduce`, `report`
and `bench`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from . import demo as demonstration
from . import show

ELSEWHERE = ("train", "reproduce", "report", "bench")
INSTALL = "pip install retrograde-experiments (from a checkout: pip install ./experiments)"


class _Commands(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name. Exits, and says what to install, if another distribution has it."""
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in ELSEWHERE:
            raise SystemExit(f"retrograde {cmd_name} comes with the experiments, which are not installed: {INSTALL}")
        return found


app = typer.Typer(
    cls=_Commands, help="Train residual networks without storing their activations.", no_args_is_help=True, add_completion=False,
    epilog=f"{', '.join(ELSEWHERE)} come with the experiments: {INSTALL}",
)  # fmt: skip


def _print_version(asked: bool) -> None:
    if asked:
        print(metadata.version("retrograde"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `retrograde` itself."""


@contextmanager
def _errors_in_one_line(stopped: str) -> Iterator[None]:
    """`stopped`: how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(f"Stopped. {stopped}", soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        Console(stderr=True).print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = demonstration.Setting.epochs,
    depth: Annotated[int, typer.Option(min=1, help="residual blocks")] = demonstration.Setting.depth,
    out: Annotated[Path, typer.Option(help="folder for the figure")] = Path("out"),
    seed: Annotated[int, typer.Option(min=0, help="of the initial weights, the split and the batches")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a few steps of a small network, in seconds")] = False,
) -> None:
    """Train one residual network three ways on real digits, and compare accuracy, memory and time."""
    setting = demonstration.Setting(epochs=epochs, depth=depth, seed=seed)
    if quick:
        setting = demonstration.quick(setting)
    console = Console()
    with _errors_in_one_line("Nothing was kept: the same command starts again, and --quick takes seconds."):
        demonstration.check_packages()
        console.print(show.opening(setting))
        with show.Progress(console) as progress:
            outcome = demonstration.run(setting, progress)
        console.print(show.table(outcome))
        console.print(show.reading(outcome))
        path = show.figure(outcome, out / "demo.png")
    console.print(f"Figure: {path}", soft_wrap=True, highlight=False)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="of torchvision, timm, transformers, the hub, or module:function giving it (and input)")],
    batch: Annotated[int, typer.Option(min=1, help="how many inputs a step takes")] = 32,
    size: Annotated[int | None, typer.Option(min=1, help="pixels of an image's side, or tokens of a text")] = None,
    gamma: Annotated[float, typer.Option(min=0, max=1)] = 1 / 8,
    budget: Annotated[str, typer.Option(help="memory to fit into, as 24GB; shows what fits")] = "",
    amp: Annotated[str, typer.Option(help="mixed precision: bf16 or fp16")] = "",
    optimizer: Annotated[str, typer.Option(help="whose state to count: none, sgd (with momentum), adamw, adamw8bit, lion, …")] = "none",
    lora_rank: Annotated[int, typer.Option(min=0, help="train adapters of this rank alone")] = 0,
    stages: Annotated[list[str] | None, typer.Option("--stage", help="a path or pattern; may be repeated")] = None,
    split: Annotated[bool, typer.Option("--split", help="attention and MLP of transformer layers as steps of their own")] = False,
) -> None:  # fmt: skip
    """Show what would be converted in a model, and the memory of a training step each way, predicted."""
    from . import plan as planning

    with _errors_in_one_line("Nothing was changed: the same command starts again."):
        planning.main(model, batch, size, gamma, budget, amp, optimizer, lora_rank, stages or [], split)


for _command in metadata.entry_points(group="retrograde.commands"):
    _command.load()(app)
