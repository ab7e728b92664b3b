"""γ in the config of a transformers model, which `save_pretrained` writes and `from_pretrained` reads.

    model.config.retrograde = {"stages": [{"blocks": "model.layers.0-11", "gamma": "1/8", "form": "block", "velocity": None}]}

The entry is what `convert` did, and follows γ where that is changed. `convert` restores it; `revert` removes it. Paths are relative to
the model that has the config, so an entry is found again with or without a head, and inside of a wrapper (peft, a training module).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..nets import saved
from . import block as blocks
from .find import WRAPPED, Run, join, run_of
from .stage import Stage

KEY = saved.KEY


def write(model: nn.Module) -> None:
    """Write what is converted into the configs of a model."""
    members: dict[Stage, dict[int, str]] = {}
    for path, module in model.named_modules():
        place = blocks.place_of(module)
        if place is not None and not place.stage.checkpointed:
            members.setdefault(place.stage, {})[place.index] = _bare(path)
    for stage in members:
        stage.records = []
    for owner, config in _configs(model):
        inside = f"{owner}." if owner else ""
        records = []
        for stage, paths in members.items():
            listed = [path for _, path in sorted(paths.items())]
            if all(path.startswith(inside) for path in listed):
                record = {"blocks": short([path[len(inside) :] for path in listed]), **stage.described}
                del record["stage"]
                if stage.steps != stage.blocks:
                    record["steps"] = stage.steps * len(listed) // stage.blocks
                stage.records.append(record)
                records.append(record)
        if records:
            setattr(config, KEY, {"stages": records})


def forget(model: nn.Module) -> bool:
    """Remove the entries; whether there were any."""
    configs = [config for _, config in _configs(model) if hasattr(config, KEY)]
    for config in configs:
        delattr(config, KEY)
    return bool(configs)


def runs(model: nn.Module) -> tuple[Run, ...]:
    """The stages that the configs of a model have."""
    found: list[Run] = []
    known = {_bare(path): (path, module) for path, module in model.named_modules(remove_duplicate=False)}
    done: list[str] = []
    for owner, config in _configs(model):
        entry = getattr(config, KEY, None)
        if not entry or any(not outer or owner.startswith(f"{outer}.") for outer in done):
            continue
        done.append(owner)
        prefix = f"{known[owner][1].base_model_prefix}."
        for record in entry["stages"]:
            given = _long(record["blocks"])
            shorter = [path.removeprefix(prefix) for path in given]
            ways = [[join(owner, path) for path in way] for way in (given, shorter, [prefix + path for path in given])]
            paths = next((way for way in ways if all(path in known for path in way)), None)
            if paths is None:
                raise ValueError(
                    f"the config of this {type(known[owner][1]).__name__} says that {record['blocks']} are a stage with "
                    f"gamma = {record['gamma']}, and the model has no such blocks. rg.revert(model) removes the entry; then convert "
                    "with stages and gamma of your own."
                )
            gamma = saved.read(record["gamma"])
            run = Run(
                run_of(paths).name,
                tuple(known[path][0] for path in paths),
                record.get("steps", len(paths)),
                record["form"],
                gamma,
                record["velocity"],
                record.get("split", False),
            )
            found.append(run)
    return tuple(found)


def _bare(path: str) -> str:
    """A path without what `checkpoint_wrapper` adds."""
    return path.replace(f"{WRAPPED}.", "").removesuffix(f".{WRAPPED}")


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configs of the transformers models in a model, each with the path of the outermost that has it."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        config = module.__dict__.get("config")
        if hasattr(type(module), "base_model_prefix") and hasattr(config, "to_dict") and id(config) not in seen:
            seen.add(id(config))
            yield path, config


def short(paths: Sequence[str]) -> str | list[str]:
    """Paths of blocks in few words, where that is possible.

    >>> short(["layers.0", "layers.1", "layers.2"]), short(["a.0", "b.0"])
    ('layers.0-2', ['a.0', 'b.0'])
    """
    name = run_of(paths).name
    return name if _long(name) == list(paths) else list(paths)


def _long(name: str | Sequence[str]) -> list[str]:
    if not isinstance(name, str):
        return list(name)
    found = re.fullmatch(r"(.*?)(\d+)-(\d+)", name)
    return [f"{found[1]}{k}" for k in range(int(found[2]), int(found[3]) + 1)] if found else [name]
