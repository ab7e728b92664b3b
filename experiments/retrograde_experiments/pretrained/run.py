"""The units of an experiment, in this process or in several at once, each a line of metrics when it is finished.

Small networks keep a GPU busy for a fraction of the time: several processes share it (`jobs`). Killed at any moment, the same
command goes on with what is not finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..config import from_json, to_json
from ..errors import ExperimentError, suggestion
from ..metrics import Key, Record, named
from ..run import side_by_side, when_and_where
from .store import Store

EXPERIMENTS = {"cifar": "cifar_transfer", "imagenet": "imagenet_photos", "language": "language", "sentence": "sentence",
               "deploy": "deploy", "deploy-images": "deploy_images", "cost": "cost", "characters": "characters"}  # fmt: skip


def experiment(name: str) -> Any:
    """The module of an experiment: `Config`, `units`, `measure`.

    Raises:
        ExperimentError: if there is none of that name.
    """
    if name not in EXPERIMENTS:
        raise ExperimentError(f"there is no experiment {name!r}. {suggestion(name, EXPERIMENTS)}")
    return import_module(f"{__package__}.{EXPERIMENTS[name]}")


def run(
    name: str, config: Any, out: Path, root: Path, *, device: str = "cpu", jobs: int = 1, only: dict[str, str] | None = None,
    seconds: float | None = None, say: Callable[[str], None] = print,
) -> list[Record]:  # fmt: skip
    """Do the units that are not done yet.

    Args:
        out: folder of the file NAME.jsonl.
        root: the data directory.
        jobs: processes.
        only: units whose key has these values, and no others.
        seconds: begin no unit after so long.

    Raises:
        ExperimentError: with what to do. What was finished before is untouched.
    """
    module = experiment(name)
    store = Store(
        out / f"{name}.jsonl", {"experiment": name, "device": torch.device(device).type, "config": to_json(config)}
    )
    every = module.units(config)
    chosen = [unit for unit in every if all(str(unit.get(key)) == value for key, value in (only or {}).items())]
    if not chosen:
        raise ExperimentError(f"no unit has {only}. One of the {len(every)} there are: {named(every[0])}.")
    todo = [unit for unit in chosen if not store.done(unit)]
    say(f"{name}: {len(todo)} units to do, {len(chosen) - len(todo)} of {len(chosen)} done before")
    begun, finished = time.perf_counter(), 0

    def note(unit: Key, values: dict[str, Any], took: float) -> None:
        nonlocal finished
        finished += 1
        store.add(Record(unit, values, when_and_where(device, took)))
        shown = ", ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float))
        say(f"  {finished}/{len(todo)}  {named(unit)}: {shown}  ({took:.1f} s)")

    def late() -> bool:
        return seconds is not None and time.perf_counter() - begun > seconds

    do = partial(work, name=name, config=to_json(config), device=device, root=str(root))
    if jobs > 1:
        side_by_side(do, todo, jobs, late=late, keep=note)
        return store.records
    for unit in todo:
        if not late():
            note(unit, *do(unit))
    return store.records


def work(unit: Key, name: str, config: dict[str, Any], device: str, root: str) -> tuple[dict[str, Any], float]:
    """One unit: its values, and the seconds it took."""
    module, where = experiment(name), torch.device(device)
    if where.type == "cuda":
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    begun = time.perf_counter()
    values = module.measure(from_json(module.Config, config), unit, where, Path(root))
    return values, time.perf_counter() - begun
