"""How figures look: one place for fonts, sizes and the colour of each kind of network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

COLOURS = {
    "resnet": "#6b7280", "momentum": "#ea580c", "checkpoint": "#2563eb", "revnet": "#0d9488", "reference": "#9333ea",
    "ista": "#9ca3af",
}  # fmt: skip
NAMES = {
    "resnet": "ResNet", "momentum": "Momentum ResNet", "checkpoint": "ResNet, checkpoint per block", "revnet": "RevNet",
    "reference": "momentumnet 0.10", "ista": "ISTA",
}  # fmt: skip
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False,
    "legend.frameon": False, "svg.hashsalt": "retrograde", "figure.facecolor": "white", "lines.linewidth": 2.0,
}  # fmt: skip


@contextmanager
def styled() -> Iterator[None]:
    """Every figure of an experiment is drawn and saved within this."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A Figure, drawn without any window, and its axes (an array where there are several). `options` go to `subplots`."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    return picture, picture.subplots(rows, columns, **options)
