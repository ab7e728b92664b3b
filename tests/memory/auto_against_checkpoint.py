"""`memory="auto"` against per-block checkpointing of the plain network: peak memory of a step, predicted and measured.

    python tests/memory/auto_against_checkpoint.py [--every 4] [--gamma 0.125] [--predict]

One line for each architecture of `tests/convert/architectures.py` that is tried, those above checkpointing first.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "convert")]
warnings.simplefilter("ignore")

from architectures import ARCHITECTURES  # noqa: E402

import retrograde as rg  # noqa: E402


def compare(name: str, gamma: Any, predict: bool) -> tuple[float, float, str]:
    """Peaks of auto over checkpointing's, predicted and measured, and the modes of the stages."""
    architecture = ARCHITECTURES[name]
    model, example = architecture.make(), architecture.example
    plan = rg.plan(model, example, gamma=gamma)
    predicted = plan.peaks["auto"].peak / plan.peaks["checkpoint"].peak
    modes = ", ".join(f"{row.blocks} {row.form} {row.mode}" for row in plan.stages)
    if predict:
        return predicted, 0.0, modes
    peaks = {}
    for way, ratio in (("checkpoint", 0), ("auto", gamma)):
        architecture.convert(model, gamma=ratio, memory=way)
        peaks[way] = min(rg.measure(model, example, repeats=1).peak for _ in range(2))
        rg.revert(model)
    return predicted, peaks["auto"] / peaks["checkpoint"], f"{modes}; {peaks['auto'] - peaks['checkpoint']:+} bytes"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--gamma", type=Fraction, default=Fraction(1, 8))
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    rows = []
    for name in list(ARCHITECTURES)[:: given.every]:
        if given.only in name:
            try:
                rows.append((*compare(name, given.gamma, given.predict), name))
            except (RuntimeError, TypeError) as why:  # it cannot be run without values
                print(f"{name}: {str(why)[:100]}")
    for predicted, measured, modes, name in sorted(rows, reverse=True):
        print(f"{predicted:.4f}  {measured:.4f}  {name:40} {modes}")
    above = [sum(row[column] > 1.0 for row in rows) for column in (0, 1)]
    print(f"of {len(rows)} above checkpointing: {above[0]} predicted, {above[1]} measured")


if __name__ == "__main__":
    main()
