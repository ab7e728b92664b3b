"""`retrograde compare A B …`: runs of `retrograde train` over the same seeds, against the first, by paired tests.

A folder is that of --seeds, with a folder seed-N for each, or one run. What is compared is the last line of each log.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import ExperimentError
from ..findings import Difference, spread
from ..markup import grid
from .logs import LOG, read_log
from .run import SETTING

QUANTITIES = ("accuracy", "top5", "test_loss")


def finals(folder: Path, what: str) -> dict[int, float]:
    """The last value of every seed.

    Raises:
        ExperimentError: if there is no run, or one without such a value.
    """
    runs = sorted(folder.glob(f"seed-*/{LOG}")) or sorted(folder.glob(LOG))
    if not runs:
        raise ExperimentError(f"{folder} holds no run of `retrograde train`, nor folders seed-N of such.")
    found = {}
    for log in runs:
        values = [line[what] for line in read_log(log.parent) if what in line]
        if not values:
            raise ExperimentError(f"{log} has no line with {what}: the run has not finished an epoch.")
        found[int(json.loads((log.parent / SETTING).read_text())["seed"])] = values[-1]
    return found


def table(folders: list[Path], what: str) -> str:
    """Each folder's mean, and its paired difference to the first: the interval of 95 % confidence, and the p of Student's t-test."""
    runs = [finals(folder, what) for folder in folders]
    rows = []
    for folder, values in zip(folders, runs, strict=True):
        row = [str(folder), str(len(values)), spread(list(values.values()), ".4g"), "", "", ""]
        both = sorted(values.keys() & runs[0].keys())
        if values is not runs[0]:
            if not both:
                raise ExperimentError(f"{folder} and {folders[0]} have no seed in common: there are no pairs.")
            d = Difference.of([values[s] for s in both], [runs[0][s] for s in both])
            row[3] = f"{d.mean:+.4g} ({d.pairs} pairs)"
            row[4:] = [f"{d.low:+.4g} to {d.high:+.4g}", f"{d.p:.3g}"] if d.pairs > 1 else ["", ""]
        rows.append(row)
    return grid(["run", "seeds", what, f"less {folders[0]}'s", "95 % confidence", "p"], rows)


def main(arguments: list[str] | None = None, prog: str = "retrograde compare") -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=prog, description="Compare runs of `retrograde train` over seeds, in pairs.")
    parser.add_argument("folders", nargs="+", type=Path, help="of runs; all are compared to the first")
    parser.add_argument("--of", default="accuracy", choices=QUANTITIES, help="what to compare")
    options = parser.parse_args(arguments)
    try:
        print(table(options.folders, options.of))
    except (ExperimentError, OSError) as error:
        sys.exit(f"error: {error}")
