"""Units in processes of their own, and part of the units: the metrics of one process after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrograde_experiments import gamma
from retrograde_experiments.__main__ import main
from retrograde_experiments.config import override
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.memory_batch import largest_fitting
from retrograde_experiments.metrics import named
from retrograde_experiments.progress import Quiet
from retrograde_experiments.run import reproduce

CONFIG = override(gamma.Config.smoke(), ["model=thin-resnet8", "gammas=0,1", "epochs=1", "limit=64", "batch=32"])


def values(out: Path) -> dict[str, dict]:
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {named(line["key"]): line["values"] for line in read}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("whole")
    reproduce("gamma", CONFIG, out, Quiet())
    return out


def test_side_by_side_gives_the_same_metrics(whole: Path, tmp_path: Path) -> None:
    """Units that need another's weights among them: those wait for it."""
    reproduce("gamma", CONFIG, tmp_path, Quiet(), jobs=3)
    assert values(tmp_path) == values(whole)
    assert len(values(whole)) == 4


def test_part_by_part_gives_the_same_metrics(whole: Path, tmp_path: Path) -> None:
    reproduce("gamma", CONFIG, tmp_path, Quiet(), only={"train": "0.0"})
    assert set(values(tmp_path)) == {"train=0.0 test=0.0 seed=0", "train=0.0 test=1.0 seed=0"}
    with pytest.raises(ExperimentError, match="no unit has"):
        reproduce("gamma", CONFIG, tmp_path, Quiet(), only={"train": "0.5"})
    reproduce("gamma", CONFIG, tmp_path, Quiet(), seconds=-1.0)
    assert len(values(tmp_path)) == 2
    reproduce("gamma", CONFIG, tmp_path, Quiet())
    assert values(tmp_path) == values(whole)


def test_a_unit_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    """Trained weights that are gone: the units that need them fail, the others finish."""
    reproduce("gamma", CONFIG, tmp_path, Quiet(), only={"train": "0.0", "test": "0.0"})
    (tmp_path / "weights" / "0-0.pt").unlink()
    with pytest.raises(
        ExperimentError, match=r"1 of 3 units failed. train=0.0 test=1.0 seed=0: ExperimentError: .* is missing"
    ):
        reproduce("gamma", CONFIG, tmp_path, Quiet(), jobs=2)
    assert len(values(tmp_path)) == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["table1", "--preset", "smoke", "--out", str(tmp_path)]
    main(given)
    assert "Momentum ResNet: inversion / parameters / training: yes / yes / yes" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["command"] == "retrograde reproduce table1 --preset smoke"
    with pytest.raises(SystemExit, match="Did you mean 'rings'"):
        main(["ring", "--out", str(tmp_path)])


@pytest.mark.parametrize("room", [None, 1000.0, 1100.0, 900.0])
@pytest.mark.parametrize("cap", [7, 64, 100_000])
def test_the_largest_batch(room: float | None, cap: int) -> None:
    """Whatever is believed of the room, what comes out was tried, and 3 % more does not fit."""
    tried: list[int] = []

    def needed(batch: int) -> int | None:
        tried.append(batch)
        return 40 + 3 * batch if 40 + 3 * batch <= 1000 else None

    largest = largest_fitting(needed, 2, cap, room)
    assert largest in tried
    assert min(cap, 320) / 1.04 - 1 <= largest <= min(cap, 320)
    if room == 1000 and cap > 320:
        assert len(tried) < 12
