"""The runs that wait for a GPU: each is a setting that exists, and one command goes on with all of them."""

from pathlib import Path

import pytest

from retrograde_experiments import waiting
from retrograde_experiments.config import override, preset
from retrograde_experiments.metrics import read_metrics
from retrograde_experiments.registry import load


@pytest.mark.parametrize("run", waiting.RUNS, ids=lambda run: run.folder)
def test_each_is_a_setting_that_is_allowed(run: waiting.Run) -> None:
    experiment = load(run.name)
    config = override(preset(experiment.Config, "paper"), run.changes)
    assert experiment.units(config)
    assert config.setting()


def test_it_goes_on_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = (
        waiting.Run("a", "conv4", ("batches=1,2",), 1, "a"),
        waiting.Run("bad", "cifar", ("data=cifar10", "repeats=1"), 1, "no data here"),
        waiting.Run("b", "conv4", ("batches=4",), 1, "b"),
    )  # fmt: skip
    monkeypatch.setattr(waiting, "RUNS", runs)
    monkeypatch.setenv("RETROGRADE_DATA", str(tmp_path / "none"))
    common = ["--out", str(tmp_path), "--device", "cpu"]
    waiting.main([*common, "--seconds", "0"])
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="bad: "):  # told at the end; b is run all the same
        waiting.main(common)
    assert [len(read_metrics(tmp_path / name)) for name in "ab"] == [2, 1]
    waiting.main([*common, "--only", "a"])
    waiting.main([*common, "--list"])
    assert "| a | 1 | 0 | a |" in capsys.readouterr().out
