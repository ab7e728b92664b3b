"""The commands: run, report, page."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from . import page, record, show
from .cases import SIZES, cases
from .draw import scatter
from .methods import choose, methods
from .runner import Options, run_case

NAME = "step"


def bench(
    size: str, case_patterns: Sequence[str], options: Options, out: Path, command: str, name: str = NAME
) -> Path:  # fmt: skip
    """Run the cases; the CSV. Beside it: the facts as JSON and the tables as Markdown, renewed after every case.

    Raises:
        ValueError: for a size, case or method that does not exist.
    """
    chosen = cases(size, case_patterns)
    for case in chosen:
        choose(case, options.methods, options.without)
    path = out / f"{name}.csv"
    known = show.load_facts([path])
    told = show.facts(options, command)
    out.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps([*known, told], indent=1, ensure_ascii=False), encoding="utf-8")
    _say("\n".join(f"{key}: {value}" for key, value in told.items()))
    for case in chosen:
        if options.late:
            _say(f"{case.title}: not run, out of time")
            continue
        began, rows = time.monotonic(), []
        _say(f"\n{case.title}")
        for row in run_case(case, options, _say):
            record.append(path, row)
            rows.append(row)
        order = [method.name for method in methods()]
        rows.sort(key=lambda row: order.index(row.method))
        show.show(f"{case.title}  [{time.monotonic() - began:.0f} s]", rows)
        path.with_suffix(".md").write_text(_markdown([path]), encoding="utf-8")
    return path


def report(paths: Sequence[Path], out: Path, name: str = NAME) -> list[Path]:
    """One CSV, one Markdown file and one scatter plot from the CSVs of one or several runs."""
    rows = _ordered(record.read(paths))
    facts = show.load_facts(paths)
    csv = out / f"{name}.csv"
    out.mkdir(parents=True, exist_ok=True)
    record.write(csv, rows)
    csv.with_suffix(".json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    csv.with_suffix(".md").write_text(show.markdown(rows, facts), encoding="utf-8")
    for title, group in show.grouped(rows).items():
        show.show(title, group)
    return [csv, csv.with_suffix(".md"), scatter(rows, csv.with_suffix(".png"))]


def draw(paths: Sequence[Path], picture: Path) -> Path:
    """The scatter plot alone."""
    return scatter(_ordered(record.read(paths)), picture)


def _markdown(paths: Sequence[Path]) -> str:
    return show.markdown(_ordered(record.read(paths)), show.load_facts(paths))


def _ordered(rows: list[record.Row]) -> list[record.Row]:
    """Cases and methods in the order of the code, whatever ran first."""
    names = [case.name for case in cases("full")]
    order = [method.name for method in methods()]
    return sorted(rows, key=lambda row: (names.index(row.case), order.index(row.method)))


def settings(
    device: str = "auto", size: str = "smoke", methods: Sequence[str] = ("*",), without: Sequence[str] = (),
    repeats: int | None = None, gamma: float = 0.9, backend: str | None = None, largest: float | None = None,
    minutes: float | None = None, peers: Path | None = None, cudnn_benchmark: bool = False,
) -> Options:  # fmt: skip
    """Options, and what they need of the process: TF32, the allocator, the folder of other packages."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if peers is not None:
        sys.path.append(str(peers))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = cudnn_benchmark
    smoke = size == "smoke"
    return Options(
        tuple(methods), tuple(without), repeats or (2 if smoke else 7), 0 if smoke else 1, gamma, device,
        backend or ("aot_eager_decomp_partition" if smoke else "inductor"),
        None if largest is None else int(largest * 1e9),
        float("inf") if minutes is None else time.monotonic() + 60 * minutes,
    )  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="step.py", description="Time and memory of training steps, method against method."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--cases", nargs="+", default=["*"], metavar="NAME", help="names, parts of names, or patterns")
    run.add_argument("--methods", nargs="+", default=["*"], metavar="NAME")
    run.add_argument("--without", nargs="+", default=[], metavar="NAME", help="methods to leave out")
    run.add_argument("--size", choices=SIZES, default="full")
    run.add_argument("--out", type=Path, default=Path("out/bench"))
    run.add_argument("--name", default=NAME, help="of the files, without ending")
    run.add_argument("--device", default="auto")
    run.add_argument("--repeats", type=int)
    run.add_argument("--gamma", type=float, default=0.9)
    run.add_argument("--backend", help="of torch.compile; inductor, or at size smoke one that needs no compiler")
    run.add_argument("--largest", type=float, metavar="GB", help="also look for the largest batch in so much memory")
    run.add_argument("--minutes", type=float, help="begin nothing new after so long")
    run.add_argument("--peers", type=Path, help="folder with momentumnet, revlib and memcnn")
    run.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN choose its algorithms by trial")
    listed = commands.add_parser("list", help="cases and methods")
    listed.add_argument("--size", choices=SIZES, default="full")
    told = commands.add_parser("report", help="table, Markdown and scatter plot from CSVs")
    told.add_argument("csv", nargs="+", type=Path)
    told.add_argument("--out", type=Path, default=Path("out/bench"))
    told.add_argument("--name", default=NAME)
    paged = commands.add_parser(
        "page", help="figures of docs/benchmark.md from the newest step_*.csv in benchmarks/results"
    )
    paged.add_argument("--check", action="store_true", help="only say whether they are up to date")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    typed = as_typed("python benchmarks/step.py", sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(options, typed)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"{error}") from error


def _dispatch(options: argparse.Namespace, typed: str) -> None:
    if options.command == "run":
        chosen = settings(
            options.device, options.size, options.methods, options.without, options.repeats, options.gamma, options.backend,
            options.largest, options.minutes, options.peers, options.cudnn_benchmark,
        )  # fmt: skip
        _say(f"\nwritten: {bench(options.size, options.cases, chosen, options.out, typed, options.name)}")
    elif options.command == "list":
        for case in cases(options.size):
            _say(f"{case.name:<24} {case.title}\n    {', '.join(method.name for method in choose(case, ['*']))}")
    elif options.command == "report":
        _say("written: " + ", ".join(map(str, report(options.csv, options.out, options.name))))
    else:
        new = page.update()
        current = new == page.PAGE.read_text(encoding="utf-8")
        if options.check and not current:
            raise SystemExit("docs/benchmark.md is out of date: python benchmarks/step.py page")
        page.PAGE.write_text(new, encoding="utf-8")
        _say("up to date" if current else "docs/benchmark.md written")


def as_typed(program: str, arguments: Sequence[str]) -> str:
    """The command, without the folders of the machine it ran on.

    >>> as_typed("retrograde bench", ["--peers", "/home/me/peers", "--cases", "L24"])
    'retrograde bench --peers peers --cases L24'
    """
    return " ".join([program, *(Path(a).name if Path(a).is_absolute() else a for a in arguments)])


def _say(text: str) -> None:
    print(text, flush=True)


def prepare() -> None:
    """Before CUDA starts: segments that grow, so that the memory of one method is of use to the next."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
