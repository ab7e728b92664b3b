"""Which blocks of a model can run as momentum networks: by what is known of their classes, or by name.

    found = find(model)                        # every run of two or more known blocks that keep their shape
    found = named(model, ["encoder.layers"])   # these, whatever they are

A stage is a run of consecutive blocks in one `nn.Sequential` or `nn.ModuleList`. Models of other classes are probed: see
`probe`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from torch import nn

from .adapters import KEEPS, is_chain, judge

CONTAINERS = (nn.ModuleList, nn.Sequential)
WRAPPED = "_checkpoint_wrapped_module"


@dataclass(frozen=True)
class Run:
    """Blocks that follow one another: a stage to be.

    Attributes:
        gamma, velocity: those that it was saved with.
        split: its layers are several steps each, but for those that are left whole for a reason, `whole`.
        trusted: it is known what the blocks compute, by their classes or from a trial.
    """

    name: str
    blocks: tuple[str, ...]
    steps: int
    form: str = "block"
    gamma: Any = None
    velocity: str | None = None
    split: bool = False
    whole: str = ""
    trusted: bool = True


@dataclass(frozen=True)
class Left:
    """A block that stays as it is, and why. It may be run again in backward to save memory."""

    path: str
    reason: str


@dataclass(frozen=True)
class Finding:
    """What was found in a model."""

    runs: tuple[Run, ...]
    left: tuple[Left, ...]

    @property
    def blocks(self) -> list[str]:
        return [path for run in self.runs for path in run.blocks]


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def run_of(paths: Sequence[str], form: str = "block") -> Run:
    """A run named after its container and the blocks in it.

    >>> run_of(["layer1.1", "layer1.2"]).name
    'layer1.1-2'
    >>> run_of(["a.block", "b.block"]).name
    'a.block … b.block'
    """
    first, last = (path.removesuffix(f".{WRAPPED}").rpartition(".") for path in (paths[0], paths[-1]))
    if first[0] != last[0]:
        name = f"{paths[0]} … {paths[-1]}"
    else:
        name = join(first[0], first[2] if len(paths) == 1 else f"{first[2]}-{last[2]}")
    return Run(name, tuple(paths), len(paths), form)


def find(model: nn.Module, least: int = 2) -> Finding:
    """The runs of at least this many blocks that are known to keep their shape."""
    runs: list[Run] = []
    left: list[Left] = []
    inside: set[nn.Module] = set()
    for path, container in model.named_modules():
        if not (isinstance(container, CONTAINERS) or is_chain(container)) or container in inside:
            continue
        found = [unwrapped(join(path, name), child) for name, child in container._modules.items() if child is not None]
        children = [(child_path, child, judge(child)) for child_path, child in found]
        inside.update(module for _, child, verdict in children if verdict is not None for module in child.modules())
        for keeps, group in groupby(children, key=lambda row: row[2] == KEEPS):
            verdicts = {child_path: verdict for child_path, _, verdict in group if verdict is not None}
            if keeps and len(verdicts) >= least:
                runs.append(run_of(list(verdicts)))
                continue
            short = f"a run of {len(verdicts)}, and stages begin at {least}"
            left += [Left(child_path, short if keeps else verdict) for child_path, verdict in verdicts.items()]
    return Finding(tuple(runs), tuple(left))


def unwrapped(path: str, module: nn.Module) -> tuple[str, nn.Module]:
    """A block, and its path, inside of what `torch.distributed`'s `checkpoint_wrapper` put around it."""
    while WRAPPED in module._modules:
        path, module = join(path, WRAPPED), module.get_submodule(WRAPPED)
    return path, module


def named(model: nn.Module, patterns: Sequence[str], form: str = "block") -> Finding:
    """The stages that the user named: each a container, or a pattern for containers or for blocks.

    Raises:
        ValueError: for a name that nothing in the model has, with the nearest; for blocks known to change their shape.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    modules = dict(model.named_modules())
    every = dict(model.named_modules(remove_duplicate=False))  # a block that occurs again has another path there
    runs: list[Run] = []
    for pattern in patterns:
        matches = _matches(pattern, modules)
        containers = [path for path in matches if isinstance(modules[path], CONTAINERS)]
        groups = [[join(path, name) for name in modules[path]._modules] for path in containers]
        blocks = [path for path in matches if path not in containers]
        for group in [*groups, *([blocks] if blocks else [])]:
            if not group:
                raise ValueError(f"stage {pattern!r} is empty.")
            runs.append(run_of(group, form))
    for k, run in enumerate(runs):
        verdicts = {path: judge(every[path]) for path in run.blocks}
        runs[k] = replace(run, trusted=form == "block" and None not in verdicts.values())
        rest = [path for path, verdict in verdicts.items() if verdict in (None, KEEPS)]
        for path, verdict in verdicts.items():
            if path not in rest:
                advice = f": stages={[_pattern(rest)]!r}." if rest else "."
                raise ValueError(
                    f"stage {run.name!r}: {path} {verdict}, so it cannot be a step of a momentum network. Leave it out{advice}"
                )
    listed = [path for run in runs for path in run.blocks]
    twice = next((path for path in listed if listed.count(path) > 1), None)
    if twice:
        raise ValueError(f"{twice} is in two of the stages {patterns!r}.")
    return Finding(tuple(runs), ())


def _matches(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    """The module of this path, or those that the pattern fits at its depth."""
    if pattern in modules:
        return [pattern]
    depth = pattern.count(".")
    matches = [path for path in modules if path and path.count(".") == depth and fnmatchcase(path, pattern)]
    if not matches:
        near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(
            f"no part of the model is called {pattern!r}.{hint} Stages are paths as in model.named_modules()."
        )
    return matches


def _pattern(paths: Sequence[str]) -> str:
    """A pattern for these blocks of one container, all but the first of it."""
    parent, _, first = paths[0].rpartition(".")
    return f"{parent}.[{first[0]}-9]*" if len(paths) > 1 and first.isdigit() else paths[0]


def looked_at(model: nn.Module) -> str:
    """The containers of a model, for an error message."""
    rows = []
    for path, module in model.named_modules():
        if isinstance(module, CONTAINERS) and len(module):
            kinds = dict.fromkeys(type(child).__name__ for child in module.children())
            rows.append(f"  {path or '(the model itself)'}: {len(module)} × {', '.join(kinds)}")
    return "\n".join(rows[:12] + ([f"  … and {len(rows) - 12} more"] if len(rows) > 12 else [])) or "  (no container)"
