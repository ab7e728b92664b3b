"""benchmarks/host_time.py runs on the small twin of its case."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "host_time.py"


def test_every_method_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("host_time", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(["--device", "cpu", "--repeats", "1", "--profile", "checkpoint"])
    told = capsys.readouterr().out
    rows = [line.split() for line in told.splitlines()[: len(script.METHODS)]]
    assert [row[0] for row in rows] == list(script.METHODS)
    for _, forward, backward, wait, whole in rows:
        assert float(forward) + float(backward) + float(wait) == pytest.approx(float(whole), abs=0.05)
    assert "run_backward" in told
