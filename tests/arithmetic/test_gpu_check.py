"""The script for GPUs, its cases run where the tests run."""

import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", gpu_check.CASES, ids=lambda case: case.__name__)
def test_case(case: gpu_check.Case) -> None:
    assert case(DEVICE)


def test_a_case_that_fails_is_told_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def good(device: str) -> str:
        return "well"

    def bad(device: str) -> str:
        return f"{gpu_check.same([torch.zeros(2)], [torch.ones(2)])}"

    monkeypatch.setattr(gpu_check, "CASES", (bad, good))
    assert gpu_check.main([]) == 1
    told = capsys.readouterr().out
    assert "FAILED  bad: AssertionError: tensor 0, torch.float32 of shape (2,), differs" in told
    assert "ok      good: well" in told
    assert gpu_check.main(["good"]) == 0


def test_a_steady_block_is_not_refused() -> None:
    with pytest.raises(AssertionError, match="was not found"):
        gpu_check.first_refused(torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True))


def test_the_script_needs_no_test_runner() -> None:
    code = (
        "import runpy, sys; sys.modules['hypothesis'] = sys.modules['pytest'] = None; "
        "path = sys.argv.pop(1); runpy.run_path(path, run_name='__main__')"
    )
    path = Path(gpu_check.__file__)
    found = subprocess.run(
        [sys.executable, "-c", code, str(path), "hash"], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "25 hashes" in found.stdout
