"""The benchmark is a package beside the library, not part of it."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """Every measurement of memory collects garbage first: it need not look through all that PyTorch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
