"""`retrograde bench`: the command and its options. Nothing that takes time to import is imported before a command runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .runner import Options

CASES = Annotated[
    list[str] | None, typer.Option(help="a case, a part of its name, or a pattern; may be repeated; all by default")
]
METHODS = Annotated[
    list[str] | None, typer.Option(help="plain, ours\\[memory=reverse,form=relu], ...; may be repeated, or joined by commas")
]  # fmt: skip
DEVICE = Annotated[str, typer.Option(help="cpu, cuda or auto")]
SIZE = Annotated[str, typer.Option(help="smoke (seconds a case, on a CPU), cpu (minutes) or full (a GPU)")]
PEERS = Annotated[Path | None, typer.Option(help="folder with momentumnet, revlib, memcnn")]

group = typer.Typer(
    help="Time and memory of training steps against plain autograd, checkpointing, the compiler and other packages."
)


def bench(app: typer.Typer) -> None:
    """Register `retrograde bench`."""
    app.add_typer(group, name="bench", invoke_without_command=True, callback=measure)


def measure(
    context: typer.Context,
    cases: CASES = None,
    methods: METHODS = None,
    without: Annotated[list[str] | None, typer.Option(help="leave out methods with this in their name; may be repeated")] = None,
    size: SIZE = "smoke",
    out: Annotated[Path, typer.Option(help="the table that the rows are added to")] = Path("out/bench.csv"),
    figure: Annotated[Path | None, typer.Option(help="also draw time against memory")] = None,
    device: DEVICE = "auto",
    repeats: Annotated[int | None, typer.Option(min=1, help="rounds that count; 2, 5 or 7, by size")] = None,
    gamma: Annotated[float, typer.Option(help="of momentum networks")] = 0.9,
    backend: Annotated[str, typer.Option(help="of torch.compile; inductor, or at size smoke one that needs no compiler")] = "",
    peers: PEERS = None,
    largest: Annotated[float | None, typer.Option(help="GB of memory to look for the largest batch in")] = None,
    minutes: Annotated[float | None, typer.Option(help="begin nothing new after so long")] = None,
    cudnn_benchmark: Annotated[bool, typer.Option("--cudnn-benchmark", help="let cuDNN choose its algorithms by trial")] = False,
) -> None:  # fmt: skip
    """Measure. Without options: small networks on a CPU, in minutes."""
    if context.invoked_subcommand is not None:
        return
    from .cases import cases as chosen_cases
    from .draw import scatter
    from .methods import choose
    from .notation import separated
    from .record import append
    from .runner import run_case
    from .show import aligned, facts

    prepare(peers, cudnn_benchmark)
    options = settings(size, device, separated(methods or []), without or [], repeats, gamma, backend, largest, minutes)
    rows = []
    try:
        todo = chosen_cases(size, cases or ["*"])
        orders = [[method.name for method in choose(case, options.methods, options.without)] for case in todo]
        known = facts(options, as_typed(sys.argv[1:]))
        typer.echo(f"{known.device}, {known.host}; {known.versions}\n{known.settings}")
        for number, (case, order) in enumerate(zip(todo, orders, strict=True), 1):
            began = time.monotonic()
            typer.echo(f"\n{case.title}  [case {number} of {len(todo)}]")
            found = []
            for row in run_case(case, options, typer.echo, known):
                append(out, [row])
                found.append(row)
            found.sort(key=lambda row: order.index(row.method))
            typer.echo(aligned(f"\n{case.title}  [{time.monotonic() - began:.0f} s]", found))
            rows += found
        typer.echo(f"\n{len(rows)} rows added to {out}")
        if figure is not None:
            typer.echo(f"drawn: {scatter(rows, figure)}")
    except ValueError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        typer.echo(
            f"\nStopped. {len(rows)} rows are in {out}; the cases after them: --cases NAME (retrograde bench list)."
        )
        raise SystemExit(130) from None


@group.command(name="list")
def listed(size: SIZE = "full") -> None:
    """Cases, and the methods measured where none are named."""
    from .cases import cases
    from .methods import choose

    for case in cases(size):
        typer.echo(f"{case.name:<24} {case.title}\n    {', '.join(method.name for method in choose(case))}")


@group.command(name="page")
def paged(
    check: Annotated[bool, typer.Option("--check", help="only say whether the tables are up to date")] = False,
) -> None:
    """Make the tables and the figure of docs/benchmark.md from benchmarks/results/table.csv."""
    from . import page, record
    from .draw import scatter

    if not page.PAGE.exists():
        raise SystemExit("this needs a checkout of the repository, installed with pip install -e ./experiments")
    new = page.update()
    if check:
        if new != page.PAGE.read_text(encoding="utf-8"):
            raise SystemExit("docs/benchmark.md is out of date: retrograde bench page")
        return
    page.PAGE.write_text(new, encoding="utf-8")
    drawn = scatter([row for row in page.shown(record.read(record.TABLE)) if not row.predicted], page.FIGURE)
    typer.echo(f"written: {page.PAGE.relative_to(record.ROOT)}, {drawn.relative_to(record.ROOT)}")


@group.command()
def inside(
    what: Annotated[str, typer.Argument(help="allocations, kernels or host")],
    cases: CASES = None,
    methods: METHODS = None,
    size: SIZE = "full",
    device: DEVICE = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="of what the host does")] = 12,
    top: Annotated[int, typer.Option(min=1, help="lines to show of each method")] = 16,
    peers: PEERS = None,
) -> None:
    """Look inside one step: what is in memory at its peak, which kernels run, where the host spends its time."""
    import torch

    from .cases import cases as chosen_cases
    from .inside import look
    from .methods import choose
    from .notation import separated

    prepare(peers, False)
    written = separated(methods or ["checkpoint", "ours[memory=reverse]"])
    try:
        for case in chosen_cases(size, cases or ["resnet1202-128"]):
            for line in look(what, case, choose(case, written), torch.device(where(device)), repeats, top):
                typer.echo(line)
    except ValueError as error:
        raise SystemExit(str(error)) from error


@group.command()
def accuracy() -> None:
    """Errors of outputs and gradients: fixed point against float64, 16-bit state against float32. Seconds on a CPU."""
    from .accuracy import HEADER, fixed_point, narrow
    from .show import markdown_table

    for measured in (fixed_point(), narrow()):
        typer.echo("\n".join(markdown_table([HEADER, *(row.cells for row in measured)])) + "\n")


@group.command()
def predict(
    models: Annotated[list[str] | None, typer.Option(help="a model, or a part of its name; may be repeated")] = None,
    out: Annotated[Path, typer.Option(help="the table that the rows are added to")] = Path("out/bench.csv"),
) -> None:
    """Predicted against measured memory of eight models, on a GPU."""
    import torch

    from .predict import rows
    from .record import append
    from .show import aligned, facts

    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here, and only its memory is compared.")
    prepare(None, False)
    known = facts(settings("full", "cuda", [], [], 3, 0.9, "", None, None), as_typed(sys.argv[1:]))
    for row in rows(models or ["*"], known):
        append(out, [row])
        typer.echo(aligned(row.title, [row]))


def prepare(peers: Path | None, cudnn_benchmark: bool) -> None:
    """What a run needs of the process: TF32, the folder of other packages, and before CUDA starts, segments that grow."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    if peers is not None:
        sys.path.append(str(peers))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = cudnn_benchmark


def where(device: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def settings(
    size: str, device: str, methods: Sequence[str], without: Sequence[str], repeats: int | None, gamma: float, backend: str,
    largest: float | None, minutes: float | None,
) -> Options:  # fmt: skip
    """Options of a run."""
    from .runner import Options

    smoke = size == "smoke"
    return Options(
        methods=tuple(methods),
        without=tuple(without),
        repeats=repeats or {"smoke": 2, "cpu": 5}.get(size, 7),
        warmup=0 if smoke else 1,
        gamma=gamma,
        device="cpu" if size == "cpu" and device == "auto" else where(device),
        backend=backend or ("aot_eager_decomp_partition" if smoke else "inductor"),
        size=size,
        resident=size == "cpu",
        limit=None if largest is None else int(largest * 1e9),
        until=float("inf") if minutes is None else time.monotonic() + 60 * minutes,
    )


def as_typed(arguments: Sequence[str]) -> str:
    """The command, without the folders of the machine it ran on.

    >>> as_typed(["bench", "--peers", "/home/me/peers", "--cases", "L24"])
    'retrograde bench --peers peers --cases L24'
    """
    return " ".join(["retrograde", *(Path(a).name if Path(a).is_absolute() else a for a in arguments)])
