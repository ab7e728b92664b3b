"""`python -m retrograde_experiments.pretrained`: prepare, check, parts, one of the experiments, report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ..config import override
from ..data.images import data_dir
from ..errors import ExperimentError, suggestion
from .run import EXPERIMENTS, experiment, run

COMMANDS = ("prepare", "check", "parts", "report", *EXPERIMENTS)
PRESETS = ("default", "small", "smoke")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m retrograde_experiments.pretrained", description=__doc__)
    parser.add_argument("command", help=", ".join(COMMANDS))
    parser.add_argument("--data-dir", help="where data and weights are (default: $RETROGRADE_DATA, or data)")
    parser.add_argument("--out", type=Path, help="folder of the results, or of the parts")
    parser.add_argument("--device", help="cpu or cuda (default: what there is)")
    parser.add_argument("--preset", default="default", choices=PRESETS, help="default: the full run; small: for a CPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the setting")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE", help="do the units with this value alone"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device")
    parser.add_argument("--seconds", type=float, help="begin no unit after so long")
    parser.add_argument("--part-mib", type=int, default=56, help="the most a part may take")
    parser.add_argument("--item", help="prepare: this one alone")
    parser.add_argument("--page", type=Path, default=Path("docs/pretrained.md"), help="report: the page to fill in")
    options = parser.parse_args(arguments)
    try:
        _do(options)
    except ExperimentError as error:
        sys.exit(str(error))


def _do(options: argparse.Namespace) -> None:
    from . import prepare, report  # they need packages that an experiment does not

    results = options.out or Path("experiments/results/pretrained")
    if options.command == "prepare":
        for line in (*prepare.prepare(options.data_dir, options.item), *prepare.check(options.data_dir)):
            print(line, flush=True)
    elif options.command == "check":
        for line in prepare.check(options.data_dir):
            print(line, flush=True)
    elif options.command == "parts":
        for folder, size in prepare.parts(options.data_dir, options.out or Path("parts"), options.part_mib << 20):
            print(f"{folder}  {size / 2**20:.1f} MiB")
    elif options.command == "report":
        print(*report.write(results, options.page), sep="\n")
    elif options.command in EXPERIMENTS:
        config = override(getattr(experiment(options.command).Config, options.preset)(), options.set)
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        only = dict(pair.split("=", 1) for pair in options.only)
        run(
            options.command, config, results, data_dir(options.data_dir), device=device, jobs=options.jobs, only=only,
            seconds=options.seconds, say=lambda line: print(line, flush=True),
        )  # fmt: skip
    else:
        raise ExperimentError(f"there is no command {options.command!r}. {suggestion(options.command, COMMANDS)}")


if __name__ == "__main__":
    main()
