"""The epochs of a training run. What is logged and saved, and when, is the watcher's business."""

from __future__ import annotations

from typing import Protocol

from ..data.batches import Source
from .learner import Learner, fast


class Watcher(Protocol):
    """Is told how a training run goes."""

    def stepped(self, learner: Learner) -> None:
        """A step is done, and the epoch not yet."""

    def tested(self, learner: Learner, epoch: int, values: dict[str, float]) -> None:
        """An epoch is done and evaluated: `test_loss`, `accuracy`. What is saved here goes on with the next epoch."""


def fit(learner: Learner, source: Source, watcher: Watcher, epochs: int | None = None) -> None:
    """Train from where the learner is to the end of its recipe, or to the end of epoch number `epochs`."""
    with fast(learner.device):
        for epoch in range(learner.done // source.steps, epochs or learner.recipe.epochs):
            for x, y in source.epoch(epoch, learner.done % source.steps):
                learner.step(x, y)
                if learner.done % source.steps:
                    watcher.stepped(learner)
            watcher.tested(learner, epoch, learner.evaluate(source))
