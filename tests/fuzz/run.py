"""Random networks until the time is up: reverse and checkpoint must give the bits of stored activations.

python tests/fuzz/run.py --minutes 60            # what `make fuzz` runs
python tests/fuzz/run.py --seed 1234 --only      # one network again
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzz_case import Case, draw
from fuzz_steps import compared


@dataclass
class Tally:
    """What a run has seen."""

    networks: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, case: Case, verdict: str, line: str) -> None:
        self.networks += 1
        self.verdicts[verdict] += 1
        if verdict == "mismatch":
            self.failures.append(f"{case}\n    {line}")

    def __str__(self) -> str:
        return f"{self.networks} networks: {self.verdicts['refused']} refused in every mode, {len(self.failures)} mismatches"


def fuzz(seed: int, seconds: float, most: int | None = None, show: object = None) -> Tally:
    """Run the cases seed, seed + 1, … until the time or the number is used up."""
    tally, end = Tally(), time.monotonic() + seconds
    while time.monotonic() < end and (most is None or tally.networks < most):
        case = draw(seed)
        before = len(tally.failures)
        tally.add(case, *compared(case))
        if callable(show):
            show(tally, tally.failures[before:])
        seed += 1
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the first network; the others follow")
    parser.add_argument("--networks", type=int, help="stop after so many")
    parser.add_argument("--only", action="store_true", help="only the network of --seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from rich.console import Console

    console = Console(soft_wrap=True)
    most = 1 if options.only else options.networks
    if options.only:
        console.print(str(draw(options.seed)), markup=False)
    start = time.monotonic()
    with console.status("…") as status:

        def show(tally: Tally, new: list[str]) -> None:
            rate = tally.networks / (time.monotonic() - start)
            status.update(f"{tally} · {rate:.0f}/s · {(time.monotonic() - start) / 60:.1f} min")
            for failure in new:
                console.print(failure, markup=False, highlight=False)
            if not console.is_terminal and tally.networks % 500 == 0:
                console.print(f"{tally} · {rate:.1f}/s", markup=False, highlight=False)

        tally = fuzz(options.seed, options.minutes * 60, most, show)
    minutes, last = (time.monotonic() - start) / 60, options.seed + tally.networks - 1
    console.print(f"{tally} in {minutes:.1f} min (seeds {options.seed} to {last})", markup=False, highlight=False)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
