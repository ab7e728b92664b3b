"""Training as a unit of an experiment: checkpoints, progress and learning curve by the framework's means."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Images, data_dir, load
from ..data.batches import Source
from ..errors import ExperimentError
from ..metrics import write_atomic, writing
from ..run import Context
from .fit import fit
from .learner import Learner
from .setting import Recipe

Curve = dict[str, list[Any]]


def small_set(name: str) -> Images:
    """A set of small images from the data directory, read once."""
    return _small_set(name, data_dir())


@lru_cache(maxsize=1)
def _small_set(name: str, root: Path) -> Images:
    return load(name, root)


def trained(
    net: nn.Module, recipe: Recipe, source: Source, context: Context,
    also: Callable[[nn.Module], dict[str, Any]] = lambda net: {},
) -> tuple[Learner, Curve]:  # fmt: skip
    """Train a network, or go on training it. The curve has one value per epoch: `train_loss`, `test_loss`, `accuracy`, and what `also`
    finds of the network after each."""
    learner = Learner(net.to(context.device), recipe, source.steps)
    unit = _Unit(context, learner, also)
    fit(learner, source, unit)
    return learner, unit.curve


class _Unit:
    """Tells the framework how the training goes."""

    def __init__(self, context: Context, learner: Learner, also: Callable[[nn.Module], dict[str, Any]]) -> None:
        self.context = context
        self.also = also
        self.curve: Curve = {"train_loss": [], "test_loss": [], "accuracy": []}
        saved = context.checkpoint.load()
        if saved is not None:
            learner.restore(saved["learner"])
            self.curve = saved["curve"]
        context.progress.steps(learner.recipe.epochs * learner.steps, learner.done)

    def stepped(self, learner: Learner) -> None:
        self.context.progress.step()
        self._save_if_due(learner)

    def tested(self, learner: Learner, epoch: int, values: dict[str, float]) -> None:
        loss = learner.loss()
        for name, value in {"train_loss": loss, **values, **self.also(learner.net)}.items():
            self.curve.setdefault(name, []).append(value)
        self.context.progress.step(f"epoch {epoch + 1}: loss {loss:.3f}, test {values['accuracy']:.2f} %")
        if loss != loss:
            raise ExperimentError(f"the loss is not a number after epoch {epoch + 1}: a lower rate is needed.")
        self._save_if_due(learner)

    def _save_if_due(self, learner: Learner) -> None:
        if self.context.checkpoint.due():
            self.context.checkpoint.save({"learner": learner.state(), "curve": self.curve})


def keep_weights(net: nn.Module, path: Path) -> None:
    """Write a network's state_dict for a later unit."""
    data = io.BytesIO()
    torch.save(net.state_dict(), data)
    with writing(path):
        write_atomic(path, data.getvalue())


def kept_weights(path: Path) -> dict[str, Any]:
    """What an earlier unit has kept."""
    if not path.exists():
        raise ExperimentError(
            f"{path} is missing: the unit that writes it is finished. Delete its line, or use another folder."
        )
    return torch.load(path, map_location="cpu", weights_only=True)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())
