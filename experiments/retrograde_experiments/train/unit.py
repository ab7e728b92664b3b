"""Training as a unit of an experiment: its settings, checkpoints, progress and learning curve by the framework's means."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import Settings
from ..data import Images, data_dir, load
from ..data.batches import Source
from ..errors import ExperimentError
from ..metrics import write_atomic, writing
from ..run import Context
from .fit import fit
from .learner import Learner
from .models import FORMS
from .setting import Recipe

Curve = dict[str, list[Any]]


@dataclass(frozen=True)
class Training(Settings):
    """Settings that the experiments on images share; the values are the paper's for CIFAR. `recipe` hands the trainer those it knows.

    `residual` is the form of the momentum networks: "branch", the paper's published one, or "relu", He's. The ResNet is He's.
    """

    residual: str = "branch"
    epochs: int = 220
    batch: int = 128
    rate: float = 0.01
    schedule: str = "multistep"
    milestones: tuple[int, ...] = (180,)
    weight_decay: float = 5e-4
    amp: str = "off"
    channels_last: bool = True
    limit: int | None = None  # training images
    repeats: int = 1

    def recipe(self, **changes: Any) -> Recipe:
        mine = {f.name for f in fields(self)} & {f.name for f in fields(Recipe)}
        return Recipe(**{**{name: getattr(self, name) for name in mine}, **changes})

    def trained_as(self) -> str:
        """The part of `setting` about the training."""
        at = ", ".join(map(str, self.milestones))
        falls = f"÷10 at epoch {at}" if self.schedule == "multistep" else self.schedule
        return (
            f"{FORMS[self.residual]}, {self.epochs} epochs of batch {self.batch}, SGD 0.9, rate {self.rate:g} ({falls}), "
            f"weight decay {self.weight_decay:g}, AMP {self.amp}, {self.repeats} seed{'s' * (self.repeats != 1)}"
        )


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
