"""Time against memory, both over those of checkpointing in the same run, one panel a case. Lower left is better.

Families share a colour: plain and checkpointing, the compiler, other packages, ours. Each point has its name, except those that were
given a budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .notation import parsed
from .record import Row, grouped

_FAMILIES = (  # part of the name, what it is, colour, marker
    ("step=graph", "CUDA graphs", "#009E73", "P"),
    ("*", "ours, given a budget", "#56B4E9", "."),
    ("ours", "ours", "#0072B2", "o"),
    ("compile", "compiled", "#E69F00", "s"),
    ("momentumnet", "other packages", "#CC79A7", "D"),
    ("revlib", "other packages", "#CC79A7", "D"),
    ("memcnn", "other packages", "#CC79A7", "D"),
    ("", "plain, checkpointed", "#444444", "^"),
)


def scatter(rows: Sequence[Row], path: Path) -> Path:
    """Draw the rows that have both figures; the path of the picture.

    Raises:
        ValueError: if there is none.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {
        title: drawn
        for title, group in grouped(rows).items()
        if (drawn := [row for row in group if row.status == "ok" and row.time_ratio and row.memory_ratio])
    }
    if not groups:
        raise ValueError("there is nothing to draw: no row has both a time and a peak beside those of checkpointing.")
    columns = min(3, len(groups))
    deep = math.ceil(len(groups) / columns)
    figure, axes = plt.subplots(deep, columns, figsize=(5.4 * columns, 4.4 * deep), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, (title, group) in zip(axes.flat, groups.items(), strict=False):
        _panel(axis, title, group, handles)
    figure.supxlabel("peak memory above parameters, gradients and batch, × checkpoint")
    figure.supylabel("training step, × checkpoint")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles), frameon=False)
    figure.draw_without_rendering()  # settles where the panels are
    for axis, group in zip(axes.flat, groups.values(), strict=False):
        _label(axis, group)
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(axis: Any, title: str, group: Sequence[Row], handles: dict[str, Any]) -> None:
    from matplotlib import ticker

    for row in group:
        _, family, colour, marker = _family(row)
        x, y = _point(row)
        handles[family] = axis.scatter(x, y, color=colour, marker=marker, s=34, alpha=0.85, lw=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        scale.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        scale.set_minor_formatter(ticker.NullFormatter())
    axis.axvline(1, color="#bbbbbb", lw=0.8, zorder=0)
    axis.axhline(1, color="#bbbbbb", lw=0.8, zorder=0)
    axis.set_title(title, fontsize=10)
    axis.margins(0.18)
    axis.grid(alpha=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _family(row: Row) -> tuple[str, str, str, str]:
    return next(family for family in _FAMILIES if family[0] in row.method)


def _short(method: str) -> str:
    """A method's name for a point.

    >>> _short("ours[memory=reverse,form=relu]"), _short("plain[step=graph]")
    ('reverse, relu', 'plain[step=graph]')
    """
    name, options = parsed(method)
    return ", ".join(options.values()) if name == "ours" else method


def _point(row: Row) -> tuple[float, float]:
    """Memory and time."""
    return row.memory_ratio or 0.0, row.time_ratio or 0.0


def _label(axis: Any, group: Sequence[Row]) -> None:
    """Names beside the points, moved up where they would lie on one another."""
    figure = axis.figure
    taken: list[tuple[float, float]] = []
    for row in sorted((row for row in group if "*" not in row.method), key=lambda row: _point(row)[::-1]):
        x, y = axis.transData.transform(_point(row))
        up = 0.0
        while any(abs(x - a) < 130 and abs(y + up - b) < 10 for a, b in taken):
            up += 10.5
        taken.append((x, y + up))
        line = {"arrowstyle": "-", "lw": 0.3, "color": "#999999"} if up else None
        axis.annotate(
            _short(row.method), _point(row), xytext=(6, up * 72 / figure.dpi - 2),
            textcoords="offset points", fontsize=6.5, color=_family(row)[2], arrowprops=line,
        )  # fmt: skip
