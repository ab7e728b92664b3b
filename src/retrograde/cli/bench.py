"""`retrograde bench`: the benchmark of `benchmarks/`, which is a package of its own and comes with a checkout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "retrograde_bench"


def commands() -> Any:
    """The benchmark's commands.

    Raises:
        SystemExit: where the benchmark is not installed.
    """
    if find_spec(PACKAGE) is None:
        raise SystemExit(
            f"the benchmark ({PACKAGE}) is not installed here: it comes with a checkout of the project. Run "
            "`python benchmarks/step.py run` there, or install the checkout with `pip install -e .`"
        )
    return import_module(f"{PACKAGE}.commands")


def run(
    cases: Sequence[str], methods: Sequence[str], without: Sequence[str], size: str, out: Path, repeats: int | None, peers: Path | None,
    largest: float | None, minutes: float | None,
) -> list[Path]:  # fmt: skip
    """Measure, then draw; the files written.

    Raises:
        SystemExit: for a case or method that does not exist, or where no row could be drawn.
    """
    bench = commands()
    bench.prepare()
    try:
        options = bench.settings(
            size=size, methods=methods, without=without, repeats=repeats, peers=peers, largest=largest, minutes=minutes
        )
        csv = bench.bench(size, cases, options, out, command=bench.as_typed("retrograde", sys.argv[1:]))
        return [csv, csv.with_suffix(".md"), bench.draw([csv], csv.with_suffix(".png"))]
    except ValueError as error:
        raise SystemExit(str(error)) from error
