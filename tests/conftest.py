"""Settings for every test."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
torch.set_num_threads(1)  # small tensors: threads only get in each other's way


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
