"""A number that came out of a run, beside the target it should meet.

Targets are chosen before the run. Where two networks are compared over seeds, the target is a test: the mean of the paired differences
with its standard error, and the interval in which the true mean lies with 95 % confidence (Student's t). The target is met if the whole
interval meets it and missed if none of the interval does. In between, or with fewer than three pairs, the run does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from retrograde.extras import require

CONFIDENCE = 0.95
FEWEST = 3  # pairs for a test


@dataclass(frozen=True)
class Finding:
    """One number for the report.

    Attributes:
        what: its name; the paper's number of the same name, in `paper.toml`, is shown beside it.
        ours: the number as read, with its unit and, over repeats, its spread.
        target: what it should be, in words ("≤ 0.1"); "" where nothing is asked.
        met: whether it is; None where nothing is asked or the run does not decide.
    """

    what: str
    ours: str
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences: how large, how sure.

    >>> d = Difference.of([95.2, 95.1, 95.3, 95.2], [95.0, 95.0, 95.0, 95.0])
    >>> f"{d.mean:.2f} ± {d.error:.2f}, {d.low:.2f} to {d.high:.2f}, p = {d.p:.3f}"
    '0.20 ± 0.04, 0.07 to 0.33, p = 0.016'
    """

    pairs: int
    mean: float
    error: float  # standard error of the mean
    low: float
    high: float  # the interval of 95 % confidence
    p: float  # of Student's t-test against a mean of 0

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Difference:
        """Of two lists in the order of their pairs."""
        apart = [a - b for a, b in zip(ours, theirs, strict=True)]
        n, middle = len(apart), sum(apart) / len(apart)
        if n < 2:
            return cls(n, middle, inf, -inf, inf, 1.0)
        stats = require("scipy.stats")
        error = float(stats.sem(apart))
        if not error:
            return cls(n, middle, 0.0, middle, middle, 0.0 if middle else 1.0)
        low, high = stats.t.interval(CONFIDENCE, n - 1, middle, error)
        return cls(n, middle, error, float(low), float(high), float(stats.ttest_1samp(apart, 0.0).pvalue))

    def within(self, least: float, most: float) -> bool | None:
        """Whether the true mean is from `least` to `most`; None if these pairs do not decide."""
        if self.pairs < FEWEST:
            return None
        if least <= self.low and self.high <= most:
            return True
        return False if self.high < least or self.low > most else None


def compared(
    what: str, ours: list[float], theirs: list[float], *, least: float = -inf, most: float = inf, form: str = ".2f", unit: str = " %",
) -> Finding:  # fmt: skip
    """A paired comparison as a finding: `ours` less `theirs`, which should be from `least` to `most`.

    >>> compared("a less b", [1.0, 2.0, 3.0], [0.5, 1.4, 2.6], least=0)
    Finding(what='a less b', ours='+0.50 ± 0.06 % (standard error, 3 pairs)', target='> 0 % (95 % confidence)', met=True)
    """
    d = Difference.of(ours, theirs)
    error = "" if d.pairs < 2 else f" ± {d.error:{form}}"
    said = (
        f"{d.mean:+{form}}{error}{unit} ("
        + ("standard error, " if error else "")
        + f"{d.pairs} pair{'s' * (d.pairs != 1)})"
    )
    if least == -inf and most == inf:
        return Finding(what, said)
    wanted = f"> {least:g}" if most == inf else f"< {most:g}" if least == -inf else f"{least:g} to {most:g}"
    return Finding(what, said, f"{wanted}{unit} ({100 * CONFIDENCE:.0f} % confidence)", d.within(least, most))


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
