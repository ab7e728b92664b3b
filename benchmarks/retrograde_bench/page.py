"""Figures of docs/benchmark.md: computed or read from results, written between its markers, never typed.

<!-- NAME -->
...
<!-- /NAME -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import bits
from .methods import methods
from .record import Row, read
from .show import grouped, load_facts, markdown_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmark.md"
RESULTS = ROOT / "benchmarks" / "results"


def newest(results: Path = RESULTS) -> Path | None:
    """The CSV with the latest date in its rows."""
    found = [
        (max((row.date for row in rows), default=""), path)
        for path in sorted(results.glob("step_*.csv"))
        if (rows := read([path]))
    ]
    return max(found)[1] if found else None


def sections(csv: Path | None) -> dict[str, str]:
    """What stands between each pair of markers."""
    rows = read([csv]) if csv else []
    return {
        "methods": _table([["method", "what it is"], *([f"`{m.name}`", m.about] for m in methods())]),
        "bits": _table(bits.table()),
        "results": _results(csv, rows),
    }


def filled(text: str, parts: dict[str, str]) -> str:
    """The page with its marked parts replaced.

    >>> filled("<!-- a --><!-- /a -->", {"a": "new"})
    '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"the page has no place for {name!r}: it needs '<!-- {name} -->' and '<!-- /{name} -->'.")
        text = pattern.sub(lambda found, part=part: f"{found[1]}\n{part}\n{found[2]}", text)  # type: ignore[misc]
    return text


def update(page: Path = PAGE, results: Path = RESULTS) -> str:
    """The page as it should be."""
    return filled(page.read_text(encoding="utf-8"), sections(newest(results)))


def _results(csv: Path | None, rows: Sequence[Row]) -> str:
    if csv is None:
        return "There is no `step_*.csv` in `benchmarks/results` yet: the commands above make one."
    out = [f"From [`{csv.name}`](../benchmarks/results/{csv.name})."]
    for fact in load_facts([csv]):
        out += ["", *(f"- {name}: {value}" for name, value in fact.items())]
    picture = csv.with_suffix(".png")
    if picture.exists():
        out += ["", f"![Time against memory](../benchmarks/results/{picture.name})"]
    for title, group in grouped(rows).items():
        out += ["", f"### {title}", "", *markdown_table(group)]
    return "\n".join(out)


def _table(rows: Iterable[Sequence[str]]) -> str:
    head, *rest = rows
    cells = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)
