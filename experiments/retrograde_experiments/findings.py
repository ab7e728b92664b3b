"""A number that came out of a run, beside the bar it should clear."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One number for the report.

    Attributes:
        what: its name; the paper's number of the same name, in `paper.toml`, is shown beside it.
        ours: the number as read, with its unit and, over repeats, its spread.
        target: what it should be, in words ("≤ 0.1"); "" where nothing is asked.
        met: whether it is; None where nothing is asked or the run is not far enough to tell.
    """

    what: str
    ours: str
    target: str = ""
    met: bool | None = None


def spread(values: list[float], form: str = ".2f", unit: str = "") -> str:
    """Mean ± standard deviation (of the sample), or the one value there is.

    >>> spread([1.0, 2.0, 3.0]), spread([0.5], ".1f", " %")
    ('2.00 ± 1.00', '0.5 %')
    """
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:{form}}{unit}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:{form}} ± {deviation:{form}}{unit}"
