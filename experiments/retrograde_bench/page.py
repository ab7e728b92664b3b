"""Tables and figure of docs/benchmark.md: computed, or read from the table of results, and written between their markers.

<!-- NAME -->
...
<!-- /NAME -->
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from . import bits
from .cases import cases
from .methods import baselines, method
from .notation import parsed
from .record import ROOT, TABLE, Row, grouped, latest, read
from .show import lines, markdown_table

PAGE = ROOT / "docs" / "benchmark.md"
FIGURE = ROOT / "docs" / "img" / "benchmark.png"


def shown(rows: Sequence[Row]) -> list[Row]:
    """The last measurement of every case and method that there still is: cases in the order of the code, baselines first."""
    order = {case.name: k for k, case in enumerate(cases("smoke"))}  # every case has a small twin
    names = [found.name for found in baselines()]

    def place(row: Row) -> tuple[int, int]:
        name, _ = parsed(row.method)
        return order.get(row.case, len(order)), names.index(name) if name in names else len(names)

    return sorted(latest(row for row in rows if _exists(row.method)), key=place)


def _exists(written: str) -> bool:
    try:
        return method(written).name == written
    except ValueError:
        return False


def sections(rows: Sequence[Row]) -> dict[str, str]:
    """What stands between each pair of markers."""
    about = [["baseline", "what it is"], *([f"`{found.name}`", found.about] for found in baselines())]
    steps = [row for row in shown(rows) if not row.predicted]
    return {
        "baselines": _left(about),
        "bits": "\n".join(markdown_table(bits.table())),
        "results": "\n".join(_results(steps)),
        "predicted": "\n".join(_predicted([row for row in rows if row.predicted])),
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


def update(page: Path = PAGE, table: Path = TABLE) -> str:
    """The page as it should be."""
    return filled(page.read_text(encoding="utf-8"), sections(read(table)))


def _results(rows: Sequence[Row]) -> list[str]:
    out = []
    for title, group in grouped(rows).items():
        measured = sorted({(row.date, row.device, row.host) for row in group})
        where = "; ".join(f"{date}: {' with '.join(filter(None, (device, host)))}" for date, device, host in measured)
        out += [f"### {title}", "", f"{where}.", "", *markdown_table(lines(group)), ""]
    return out[:-1]


def _predicted(rows: Sequence[Row]) -> list[str]:
    table = [["model", "way", "peak, predicted ÷ measured", "held, predicted ÷ measured"]]
    for row in latest(rows):
        pairs = ((row.predicted, row.peak), (row.predicted_held, row.held))
        table.append([row.title, row.method, *(f"{a / b:.3f}" if a and b else "–" for a, b in pairs)])
    return markdown_table(table)


def _left(table: Sequence[Sequence[str]]) -> str:
    head, *rest = table
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rest])
