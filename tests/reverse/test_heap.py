"""Free memory goes back to the system while blocks run."""

import subprocess
import sys

import pytest

from retrograde.reverse import heap

PROGRAM = """
import torch
from retrograde.reverse import heap

torch.empty(4_000_000).fill_(1)  # once that is freed, malloc takes pieces of up to 16 MB from its heap
pieces = [torch.ones(250_000) for _ in range(400)]
x = torch.ones(4, 4)
for _ in range(32):
    heap.give_back(x)
full = heap.resident()
more = [torch.ones(250_000) for _ in range(80)]
del pieces[::2]
for _ in range(32):
    heap.give_back(x)
print(full + 80_000_000 - heap.resident())
"""


@pytest.mark.skipif(heap.malloc_trim() is None, reason="glibc on Linux alone")
def test_holes_between_tensors_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150e6
