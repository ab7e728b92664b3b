"""What waits for a GPU: the runs that rows marked "partly" or "not run" lack, the most telling per minute first. One command:

    python -m retrograde_experiments.waiting --seconds 1700            # goes on where the last one stopped; --list names them

Each run is a folder of --out. Killed at any moment, or out of time, the same command goes on. A run that is finished takes the place
of the kept one by copying its folder over experiments/results/NAME; then `retrograde report --page docs/reproduce.md`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .config import override, preset
from .errors import ExperimentError
from .markup import grid
from .progress import Lines
from .registry import load
from .reproduce import command
from .run import missing, reproduce

SHORT = ("epochs=25", "batch=512", "rate=0.6", "schedule=onecycle", "weight_decay=0.0004947", "amp=bf16", "repeats=3")
"""A ResNet-101 of full width in minutes, with the paper's total weight decay of 3.6 e-folds."""


@dataclass(frozen=True)
class Run:
    """One run: the folder, the experiment, changes to its preset "paper", and the minutes that an H200 takes, estimated."""

    folder: str
    name: str
    changes: tuple[str, ...]
    minutes: int
    settles: str


RUNS = (
    Run("memory-batch", "memory-batch", (), 4, "Fig. 7, top: the largest batches at 16 GB, of this revision and without the old cap"),
    Run(
        "finetune-152", "finetune", ("pretrained=false", "repeats=0", "images=60"), 6,
        "Fig. 8: memory and time of a ResNet-152 by batch, by single kernels and as a CUDA graph, the reference package beside",
    ),
    Run(
        "cifar", "cifar", ("data=cifar10", "nets=resnet,momentum,momentum-learned", "memory=store", *SHORT), 28,
        "Table 2: the authors' ResNet-101, three seeds",
    ),
    Run(
        "gamma", "gamma",
        ("gammas=0,0.25,0.5,0.75,0.9,0.95,0.99,1", "trained=0,1", "refit=4", "refit_rate=0.02", "memory=store", *SHORT), 60,
        "Fig. 6, top: three seeds, with refits",
    ),
    Run(
        "finetune", "finetune", ("depth=50", "epochs=10", "warm=4", "gammas=0.125,0.3,0.5,0.7,0.9"), 20,
        "Fig. 8: accuracy of a pretrained ResNet-50 over γ (needs its weights and hymenoptera in the data directory)",
    ),
    Run("learned-gamma", "learned-gamma", SHORT, 22, "Sec. 5.2: a learned γ on CIFAR-10"),
    Run("accuracy-memory", "accuracy-memory", SHORT, 75, "Fig. 7, bottom: the authors' ResNet-101 over γ, three seeds"),
    Run(
        "ode", "ode", ("channels=1,2,4,8", "solver=rk4", "steps=2", "compile=true", "repeats=12", "epochs=60", "milestones=30"), 120,
        "Fig. 9: a time channel and an accurate solver, in pairs (the paper's solver, dopri5, waits for the device at every step)",
    ),
)  # fmt: skip


def left(run: Run, out: Path) -> int:
    """Units that are not finished."""
    from .metrics import read_metrics

    config = override(preset(load(run.name).Config, "paper"), run.changes)
    return len(missing(load(run.name), config, read_metrics(out / run.folder)))


def listing(out: Path) -> str:
    """The runs, with their commands."""
    rows = [[run.folder, str(run.minutes), str(left(run, out)), run.settles] for run in RUNS]
    commands = [f"    {command(run.name, 'paper', list(run.changes), 'cuda')}" for run in RUNS]
    return "\n".join([grid(["run", "minutes", "units left", "settles"], rows), "", *commands])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m retrograde_experiments.waiting", description="Run what waits for a GPU."
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1700, help="begin no unit after so long")
    parser.add_argument("--only", action="append", default=[], help="this run alone; may be repeated")
    parser.add_argument("--list", action="store_true", help="name the runs, the minutes they take, and their commands")
    options = parser.parse_args(arguments)
    if options.list:
        print(listing(options.out))
        return
    begun, failed = time.monotonic(), list[str]()
    for run in RUNS:
        rest = options.seconds - (time.monotonic() - begun)
        if (options.only and run.folder not in options.only) or not left(run, options.out) or rest <= 0:
            continue
        print(f"{run.folder}: {run.settles}", flush=True)
        config = override(preset(load(run.name).Config, "paper"), run.changes)
        said = command(run.name, "paper", list(run.changes), options.device)
        try:
            reproduce(
                run.name,
                config,
                options.out / run.folder,
                Lines(),
                device=options.device,
                preset="paper",
                command=said,
                seconds=rest,
            )
        except ExperimentError as error:  # the others go on
            failed.append(f"{run.folder}: {error}")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
