"""The bits of a training step are those that were recorded, in every memory mode, by the compiled kernels and by the torch ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import recorded

RECORDS = json.loads(recorded.RECORDS.read_text())


@pytest.mark.parametrize("name", recorded.CASES)
def test_bits_are_those_recorded(name: str) -> None:
    found = {mode: recorded.CASES[name](mode) for mode in recorded.modes_of(name)}
    assert len(set(found.values())) == 1, f"the memory modes differ: {found}"
    if recorded.probe(name) != RECORDS[name]["probe"]:
        pytest.skip("this processor's matrix products have other bits than where this was recorded")
    assert found["checkpoint"] == RECORDS[name]["bits"]


def test_torch_kernels_have_the_same_bits() -> None:
    """Without the compiled code, in a process of its own."""
    path = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "RETROGRADE_NATIVE": "0",
        "PYTHONPATH": path + os.pathsep + os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run([sys.executable, recorded.__file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
