"""`python -m retrograde_experiments NAME`: as `retrograde reproduce`, in plain lines, with units side by side and in part.

    python -m retrograde_experiments cifar --device cuda --jobs 9 --out out/cifar
    python -m retrograde_experiments cifar --device cuda --only seed=0 --seconds 300 --out out/cifar

Both go on with what is not done yet; the metrics are those of one process after the other.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from .config import PRESETS, override, preset
from .errors import ExperimentError
from .progress import Lines
from .registry import load
from .run import reproduce


def main(arguments: list[str] | None = None) -> None:
    summary, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="python -m retrograde_experiments", description=summary)
    parser.add_argument("name", help="of the experiment: see `retrograde reproduce --list`")
    parser.add_argument("--preset", default="default", choices=PRESETS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the setting")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; a run that is there goes on")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--jobs", type=int, default=1, help="units at a time, each in a process of its own")
    parser.add_argument("--only", action="append", default=[], metavar="KEY=VALUE", help="units with this value alone")
    parser.add_argument("--seconds", type=float, help="begin no unit after so long")
    options = parser.parse_args(arguments)
    parts = ["retrograde", "reproduce", options.name, "--preset", options.preset]
    parts += [part for change in options.set for part in ("--set", change)]
    parts += ["--device", options.device] if options.device != "cpu" else []
    try:
        config = override(preset(load(options.name).Config, options.preset), options.set)
        records = reproduce(
            options.name, config, options.out, Lines(), device=options.device, preset=options.preset, command=shlex.join(parts),
            jobs=options.jobs, only=dict(pair.split("=", 1) for pair in options.only), seconds=options.seconds,
        )  # fmt: skip
    except ExperimentError as error:
        sys.exit(f"error: {error}")
    for found in load(options.name).findings(config, records):
        print(f"{found.what}: {found.ours}" + (f" (should be {found.target})" if found.target else ""))


if __name__ == "__main__":
    main()
