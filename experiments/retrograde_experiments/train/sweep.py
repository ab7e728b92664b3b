"""`retrograde train --sweep rate=0.05,0.1 gamma=0,0.125`: a run for each combination of values, in a folder of its own.

Each is a run like any other: the same command goes on with those that are not finished. What comes out is a table, the
best first; `retrograde compare` tests the differences over seeds.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import suggestion
from ..findings import spread
from ..markup import grid
from .setting import FREE, Setting

Results = list[dict[str, float]]


def expanded(setting: Setting) -> list[Setting]:
    """The settings of a sweep, each with a folder of its own in that of the whole; without a sweep, the setting alone.

    >>> [run.out for run in expanded(Setting(sweep=("rate=0.1,0.2", "gamma=0"), out="out"))]
    ['out/rate=0.1,gamma=0', 'out/rate=0.2,gamma=0']

    Raises:
        ValueError: for a name that is no setting, or a value that it cannot have.
    """
    if not setting.sweep:
        return [setting]
    axes = [[(name, value) for value in values] for name, values in map(_axis, setting.sweep)]
    names = [axis[0][0] for axis in axes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"--sweep names {twice[0]} twice: give all of its values at once, {twice[0]}=0.1,0.2.")
    runs = []
    for point in product(*axes):
        folder = ",".join(f"{name}={value.replace('/', '_')}" for name, value in point)
        values: dict[str, Any] = {name: _read(name, value) for name, value in point}
        runs.append(replace(setting, **values, sweep=(), out=str(Path(setting.out) / folder)))
    return runs


def _axis(text: str) -> tuple[str, list[str]]:
    name, given, values = text.partition("=")
    name = name.replace("-", "_")
    fields = [f.name for f in dataclasses.fields(Setting) if f.name not in FREE]
    if name not in fields:
        raise ValueError(f"--sweep {text}: there is no setting {name!r} to sweep over. {suggestion(name, fields)}")
    if not given or not all(values.split(",")):
        raise ValueError(f"--sweep takes name=value,value, as rate=0.05,0.1; got {text!r}.")
    return name, values.split(",")


def _read(name: str, value: str) -> Any:
    hint = typing.get_type_hints(Setting)[name]
    if isinstance(hint, types.UnionType):
        hint = typing.get_args(hint)[0]
    if hint is bool:
        if value not in ("true", "false"):
            raise ValueError(f"--sweep {name}: give true or false; got {value!r}.")
        return value == "true"
    if typing.get_origin(hint) is tuple:
        raise ValueError(f"--sweep {name}: a setting of several values cannot be swept over.")
    try:
        return hint(value)
    except ValueError:
        raise ValueError(f"--sweep {name}: {value!r} is no {hint.__name__}.") from None


def table(runs: list[tuple[Setting, Results | str]]) -> str:
    """What came out of each, the best mean accuracy first; of one that failed, why."""

    def accuracy(found: Results | str) -> float:
        return -1.0 if isinstance(found, str) else sum(r["accuracy"] for r in found) / len(found)

    rows = []
    for run, found in sorted(runs, key=lambda each: -accuracy(each[1])):
        if isinstance(found, str):
            rows.append([Path(run.out).name, "", found.partition(". ")[0], ""])
        else:
            columns = (("accuracy", ".2f"), ("test_loss", ".4f"))
            rows.append(
                [Path(run.out).name, str(len(found)), *(spread([r[n] for r in found], form) for n, form in columns)]
            )
    return grid(["run", "seeds", "accuracy, %", "test loss"], rows)
