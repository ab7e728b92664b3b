"""How figures look: one place for fonts, sizes, and the colour, marker and name of each kind of network.

Colours are those of Okabe and Ito, which the colour-blind tell apart; kinds differ in their markers, too. Widths are in inches
for a page of print, so that text keeps its size: labels are legible in a column and on a phone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ORANGE, BLUE, GREEN, PURPLE, SKY, YELLOW, RED, GREY, BLACK = (
    "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#b22222", "#6b7280", "#111827",
)  # fmt: skip
COLOURS = {
    "resnet": GREY, "momentum": ORANGE, "checkpoint": BLUE, "sqrt": SKY, "revnet": GREEN, "reference": PURPLE, "ista": BLACK,
    "momentum-first": YELLOW, "momentum-learned": PURPLE, "fast": BLACK, "none": SKY, "first": BLUE, "second": ORANGE,
}  # fmt: skip
MARKERS = {
    "resnet": "o", "momentum": "D", "checkpoint": "s", "sqrt": "^", "revnet": "v", "reference": "P", "ista": "x",
    "momentum-first": "<", "momentum-learned": ">", "fast": "X", "none": "s", "first": "o", "second": "D",
}  # fmt: skip
NAMES = {
    "resnet": "ResNet", "momentum": "Momentum ResNet", "checkpoint": "ResNet, checkpoint per block",
    "sqrt": "ResNet, √k checkpoints", "revnet": "RevNet", "reference": "momentumnet 0.10", "ista": "ISTA",
    "fast": "ResNet, higher rate",
}  # fmt: skip
PAPER = {"color": RED, "linestyle": (0, (1, 1)), "linewidth": 1.2}
"""A line for a number that the paper states."""
FORMATS = ("png", "svg", "pdf")
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False,
    "legend.frameon": False, "legend.fontsize": 8.5, "svg.hashsalt": "retrograde", "figure.facecolor": "white", "lines.linewidth": 1.8,
    "lines.markersize": 5, "pdf.fonttype": 42,
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


def save(picture: Any, stem: Any, formats: tuple[str, ...] = FORMATS) -> dict[str, bytes]:
    """A figure as files: the bytes by the name of the file. The same figure gives the same bytes."""
    import io

    found = {}
    for kind in formats:
        data = io.BytesIO()
        metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}[
            kind
        ]
        picture.savefig(data, dpi=150, format=kind, metadata=metadata)
        found[f"{stem}.{kind}"] = data.getvalue()
    return found
