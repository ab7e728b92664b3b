"""The experiments by name, in the paper's order. Nothing of one is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

from .errors import ExperimentError, suggestion
from .findings import Finding
from .metrics import Record
from .run import Context, Key

MODULES = {
    "dynamics": "dynamics",
    "table1": "table1",
    "memory-depth": "memory_depth",
    "conv4": "conv4",
    "paradigms": "paradigms",
    "statements": "statements",
    "representable": "representable",
    "rings": "rings",
    "cifar": "cifar",
    "gamma": "gamma",
    "learned-gamma": "learned_gamma",
    "imagenet": "imagenet",
    "memory-batch": "memory_batch",
    "accuracy-memory": "accuracy_memory",
    "finetune": "finetune",
    "ode": "ode",
    "lista": "lista",
}


class Experiment(Protocol):
    """What the module of an experiment holds."""

    Config: Any
    """A frozen dataclass: see `config.Config`."""

    def units(self, config: Any) -> list[Key]:
        """The work, split into units: one line of metrics each, in this order."""

    def measure(self, config: Any, unit: Key, context: Context) -> dict[str, Any]:
        """Do one unit: the values of its line. The same for the same config and unit."""

    def figure(self, config: Any, records: list[Record]) -> Any:
        """A matplotlib Figure of the metrics. Must do with an unfinished run."""

    def findings(self, config: Any, records: list[Record]) -> list[Finding]:
        """What came out, in numbers, computed from the metrics. Must do with an unfinished run."""


def load(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ExperimentError: if there is none, naming the nearest.
    """
    if name not in MODULES:
        raise ExperimentError(f"there is no experiment {name!r}. {suggestion(name, MODULES)}")
    module = f"{__package__}.{MODULES[name]}"
    try:
        return cast(Experiment, import_module(module))
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ExperimentError(
            f"the experiment {name!r} is not part of this installation: {module} is missing."
        ) from None


def about(name: str) -> str:
    """The first line of the experiment's docstring."""
    try:
        return (load(name).__doc__ or "").strip().splitlines()[0]
    except ExperimentError:
        return "(not installed)"
