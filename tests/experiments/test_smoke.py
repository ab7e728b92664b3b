"""Every experiment's smoke preset runs in seconds and leaves metrics and a figure, which needs the metrics alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrograde_experiments.config import from_json, preset
from retrograde_experiments.metrics import named, read_config, read_metrics
from retrograde_experiments.progress import Quiet
from retrograde_experiments.registry import MODULES, load
from retrograde_experiments.run import FIGURE, complete, draw, reproduce

HERE = ("dynamics", "table1", "memory-depth", "conv4", "paradigms", "statements", "representable", "rings", "lista")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("name", HERE)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = load(name)
    config = preset(experiment.Config, "smoke")
    records = reproduce(name, config, tmp_path, Quiet(), preset="smoke")
    assert complete(experiment, config, records) == (len(records), len(records))
    assert (tmp_path / FIGURE).read_bytes().startswith(PNG)
    assert b"<svg" in (tmp_path / FIGURE).with_suffix(".svg").read_bytes()
    assert (tmp_path / FIGURE).with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    assert experiment.findings(config, records)
    assert set(records[0].run) == {"date", "seconds", "hardware", "torch", "retrograde", "commit"}

    stored = read_config(tmp_path)
    assert from_json(experiment.Config, stored["config"]) == config
    picture = (tmp_path / FIGURE).read_bytes()
    (tmp_path / FIGURE).unlink()
    assert draw(tmp_path).read_bytes() == picture  # from the folder alone, and the same again

    part = records[: len(records) // 2]  # an unfinished run is drawn and read too
    assert experiment.figure(config, part) is not None
    assert len(experiment.findings(config, part)) <= len(experiment.findings(config, records))


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("which", ["smoke", "default", "paper"])
def test_presets_describe_themselves(name: str, which: str) -> None:
    experiment = load(name)
    config = preset(experiment.Config, which)
    units = [named(unit) for unit in experiment.units(config)]
    assert units
    assert len(set(units)) == len(units)
    assert config.setting().endswith(".")
    json.dumps(experiment.units(config))


def test_all_of_the_paper_is_listed() -> None:
    assert len(MODULES) == 17  # every figure and table, the theory, and two remarks


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    config = preset(load("table1").Config, "smoke")
    reproduce("table1", config, tmp_path, Quiet())
    before = (tmp_path / "metrics.jsonl").read_bytes()
    reproduce("table1", config, tmp_path, Quiet())
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert len(read_metrics(tmp_path)) == len(before.splitlines())
