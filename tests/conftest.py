"""Settings for every test."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # run the Triton kernels on CPU tensors
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
torch.set_num_threads(1)  # small tensors: threads only get in each other's way


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
