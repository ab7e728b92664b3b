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
    from . import reproduce as reproduction

    reproduction.main(name, preset, out, changes or [], device, show_list)


@app.command()
def report(
    out: Annotated[Path, typer.Option(help="the page; a Markdown one of the same name is written beside it")] = Path("report.html"),
    results: Annotated[Path | None, typer.Option(help="folder with a run per experiment  [default: the repository's]")] = None,
) -> None:  # fmt: skip
    """Write one page with every experiment: the paper's number, ours, setting, figure, command, date and hardware."""
    from . import report as reporting

    reporting.main(out, results)


@app.command()
def bench(
    cases: Annotated[list[str] | None, typer.Option(help="a case, or a pattern; may be repeated  [default: all]")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="a method, or a pattern; may be repeated  [default: all]")] = None,
    without: Annotated[list[str] | None, typer.Option(help="a method, or a pattern, to leave out; may be repeated")] = None,
    size: Annotated[str, typer.Option(help="smoke (seconds a case, on a CPU) or full (a GPU)")] = "smoke",
    out: Annotated[Path, typer.Option(help="folder for CSV, Markdown and figure")] = Path("out/bench"),
    repeats: Annotated[int | None, typer.Option(min=1, help="rounds that count  [default: 2 or 7, by size]")] = None,
    peers: Annotated[Path | None, typer.Option(help="folder with momentumnet, revlib, memcnn")] = None,
    largest: Annotated[float | None, typer.Option(help="GB of memory to look for the largest batch in")] = None,
    minutes: Annotated[float | None, typer.Option(help="begin nothing new after so long")] = None,
) -> None:  # fmt: skip
    """Time and memory of training steps against plain autograd, checkpointing, the compiler and other packages."""
    from . import bench as benchmark

    written = benchmark.run(
        cases or ["*"], methods or ["*"], without or [], size, out, repeats, peers, largest, minutes
    )
    Console().print("written: " + ", ".join(map(str, written)), soft_wrap=True, highlight=False)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Train a residual network on images, plain or with momentum; the same command goes on with an interrupted run."""
    from . import train as trainer

    trainer.main(context.args)
