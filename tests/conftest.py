"""Settings for every test."""

import gc
import os

import pytest
import torch
from hypothesis import settings
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # run the Triton kernels on CPU tensors
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
torch.set_num_threads(1)  # small tensors: threads only get in each other's way


@pytest.fixture(scope="module", autouse=True)
def _little_to_look_through() -> None:
    """Measuring memory collects garbage first: not in all that was imported, which takes longer than most measurements."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or what is left at the end would be said to leak


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step taken: whether it formed a relu."""
    from retrograde.reverse.momentum import Momentum  # not before the interpreter is chosen

    made: list[bool] = []
    take = Momentum.take

    def noted(self: Momentum, k: int, y: Tensor) -> Tensor:
        out = take(self, k, y)
        made.append(k in self.gradient.masks)
        return out

    monkeypatch.setattr(Momentum, "take", noted)
    return made
