"""A run that is broken off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from retrograde_experiments.train.learner import Learner


@contextmanager
def broken_off(after: int) -> Iterator[None]:
    """Training inside of this ends abruptly after so many steps, as by Ctrl-C."""
    real, left = Learner.step, [after]

    def stepping(self: Learner, x: torch.Tensor, y: torch.Tensor) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(self, x, y)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "step", stepping)
        with pytest.raises(KeyboardInterrupt):
            yield
