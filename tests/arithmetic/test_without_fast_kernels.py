"""The fast kernels are only fast: without their files, and without a compiler, everything works and gives the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import retrograde

STEP = """
import hashlib, torch
import retrograde as rg
print(rg.__file__)
torch.set_num_threads(1)
torch.manual_seed(0)
found = hashlib.sha256()
for form in ("branch", "block", "relu"):
    for fixed_point in ("auto", "int16"):
        blocks = [torch.nn.Hardtanh(), torch.nn.ReLU(), torch.nn.Hardtanh()] * 3
        net = rg.MomentumNet(blocks, form=form, memory="reverse", verify="strict", fixed_point=fixed_point)
        x = torch.randn(70, 1001, requires_grad=True)
        y = net(x)
        y.square().sum().backward()
        state = net.encode(x.detach())
        back = net.inverse(state)
        for t in (y, x.grad, back):
            found.update(t.detach().numpy().tobytes())
print(found.hexdigest())
"""


def hashed(environment: dict[str, str]) -> tuple[str, str]:
    run = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2_000:]
    where, found = run.stdout.split()
    return where, found


@pytest.fixture(scope="module")
def usual() -> str:
    return hashed({"PYTHONPATH": str(Path(retrograde.__file__).parents[1])})[1]


def test_with_their_files_deleted(tmp_path: Path, usual: str) -> None:
    copied = tmp_path / "retrograde"
    shutil.copytree(Path(retrograde.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cpu.py", "native.py", "cuda.py", "cpu.c"):
        (copied / "arithmetic" / name).unlink()
    where, found = hashed({"PYTHONPATH": str(tmp_path)})
    assert Path(where).is_relative_to(tmp_path)
    assert found == usual


@pytest.mark.parametrize("setting", [{"RETROGRADE_NATIVE": "0"}, {"CC": "false"}])
def test_without_a_compiler(tmp_path: Path, usual: str, setting: dict[str, str]) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(retrograde.__file__).parents[1]), **setting}
    assert hashed(environment)[1] == usual
    assert not list((tmp_path / "retrograde").glob("*"))  # a compiler that fails leaves nothing
