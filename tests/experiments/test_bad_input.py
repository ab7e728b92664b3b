"""Bad input: a clear error that says what to do, and what was there before stays as it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command_line import app
from retrograde_experiments import metrics as store
from retrograde_experiments import table1
from retrograde_experiments.checkpoint import Checkpoint
from retrograde_experiments.config import from_json, override, preset, to_json
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.metrics import Metrics, Record, read_metrics
from retrograde_experiments.progress import Quiet
from retrograde_experiments.registry import MODULES, load
from retrograde_experiments.report import markdown
from retrograde_experiments.rows import paper, row, rows
from retrograde_experiments.run import FIGURE, available, reproduce

TINY = table1.Config(networks=("RevNet", "Momentum ResNet"), repeats=1)
HEADER = {"experiment": "table1", "device": "cpu", "config": {"a": 1}}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    reproduce("table1", TINY, folder, Quiet())
    return folder


@pytest.fixture
def finished(run: Path, tmp_path: Path) -> Path:
    """A finished run, to be harmed."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.mark.parametrize(
    ("given", "near"), [("dinamics", "dynamics"), ("memory_depth", "memory-depth"), ("ring", "rings")]
)
def test_unknown_experiment(given: str, near: str) -> None:
    with pytest.raises(ExperimentError, match=f"Did you mean '{near}'"):
        load(given)


def test_unknown_key_and_preset() -> None:
    config = load("rings").Config.smoke()
    with pytest.raises(ExperimentError, match=r"no setting 'repeat'\. Did you mean 'repeats'"):
        override(config, ["repeat=3"])
    with pytest.raises(ExperimentError, match="no setting 'gama'"):
        from_json(type(config), {"gama": 0.5})
    with pytest.raises(ExperimentError, match="Did you mean 'paper'"):
        preset(type(config), "papers")


@pytest.mark.parametrize(
    ("change", "message"), [("steps=many", "a whole number"), ("gamma=x", "a number"), ("steps", "key=value")]
)
def test_bad_values(change: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        override(load("rings").Config.smoke(), [change])


def test_values_by_type() -> None:
    config = override(load("memory-depth").Config.smoke(), ["depths=1, 2,5", "ways=resnet", "batch=7"])
    assert (config.depths, config.ways, config.batch) == ((1, 2, 5), ("resnet",), 7)
    assert from_json(type(config), json.loads(json.dumps(to_json(config)))) == config
    with pytest.raises(ExperimentError, match="there is no way 'renset'"):
        override(config, ["ways=renset"])


def test_another_config_is_refused(finished: Path) -> None:
    before = contents(finished)
    with pytest.raises(ExperimentError, match="repeats is 1 there and 2 here"):
        reproduce("table1", table1.Config(networks=TINY.networks, repeats=2), finished, Quiet())
    with pytest.raises(ExperimentError, match="another setting: experiment is 'table1' there"):
        reproduce("rings", load("rings").Config.smoke(), finished, Quiet())
    assert contents(finished) == before


def test_torn_last_line_is_run_again(finished: Path) -> None:
    path = finished / store.METRICS
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert len(read_metrics(finished)) == 1
    reproduce("table1", TINY, finished, Quiet())
    read = [{k: json.loads(line)[k] for k in ("key", "values")} for line in path.read_bytes().splitlines()]
    assert read == [{k: json.loads(line)[k] for k in ("key", "values")} for line in whole.splitlines()]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda data: b"{" + data[5:], "line 1 of .* is damaged"),
        (lambda data: data + data, "are the same unit"),
        (lambda data: b'{"key": 1}\n' + data, "line 1 of .* is damaged"),
        (lambda data: data.replace(b"RevNet", b"\xff\xfe", 1), "line 1 of .* is damaged"),
    ],
)
def test_damaged_metrics(finished: Path, harm: Any, message: str) -> None:
    path = finished / store.METRICS
    path.write_bytes(harm(path.read_bytes()))
    before = contents(finished)
    with pytest.raises(ExperimentError, match=message):
        reproduce("table1", TINY, finished, Quiet())
    assert contents(finished) == before


def test_damaged_config(finished: Path) -> None:
    (finished / store.CONFIG).write_text("{")
    with pytest.raises(ExperimentError, match=r"config\.json is damaged"):
        reproduce("table1", TINY, finished, Quiet())
    (finished / store.CONFIG).unlink()
    with pytest.raises(ExperimentError, match=r"metrics without a config\.json"):
        reproduce("table1", TINY, finished, Quiet())


def test_a_run_from_before_there_was_a_setting_goes_on_with_its_default(tmp_path: Path) -> None:
    with Metrics.open(tmp_path, HEADER) as metrics:
        metrics.add(Record({"seed": 0}, {"loss": 1.0}, {}))
    now = HEADER | {"config": {"a": 1, "b": 2}}
    with Metrics.open(tmp_path, now, defaults={"a": 0, "b": 2}) as metrics:
        assert len(metrics.records) == 1
    for defaults in ({"b": 3}, {}, None):
        with pytest.raises(ExperimentError, match="b is"), Metrics.open(tmp_path, now, defaults):
            pass


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half a line and is then full: the half is taken back, and the run goes on when there is room."""
    with Metrics.open(tmp_path, HEADER) as metrics:
        metrics.add(Record({"seed": 0}, {"loss": 1.0}, {}))
        before = contents(tmp_path)

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(store.os, "fsync", full)
            with pytest.raises(ExperimentError, match=r"No space left on device.*make room"):
                metrics.add(Record({"seed": 1}, {"loss": 2.0}, {}))
        assert contents(tmp_path) == before
        metrics.add(Record({"seed": 1}, {"loss": 2.0}, {}))
    assert [r["loss"] for r in read_metrics(tmp_path)] == [1.0, 2.0]


def test_no_room_is_asked_for_where_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    expected = pytest.raises(ExperimentError, match=r"could not write .*page: .*; put that right")
    with expected as caught, store.writing(tmp_path / "file" / "page"):
        (tmp_path / "file").mkdir()
    assert "make room" not in str(caught.value)


def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tmp_path / "unit.pt")
    checkpoint.save({"step": 1})

    def full(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(store.os, "replace", full)
        with pytest.raises(ExperimentError, match="No space left"):
            checkpoint.save({"step": 2})
    assert checkpoint.load() == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["unit.pt"]


def test_corrupt_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "unit.pt")
    checkpoint.save({"step": 1, "weights": [1.0] * 100})
    (tmp_path / "unit.pt").write_bytes((tmp_path / "unit.pt").read_bytes()[:200])
    with pytest.raises(ExperimentError, match=r"is damaged.*Delete it"):
        checkpoint.load()


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with (
        Metrics.open(tmp_path, HEADER),
        pytest.raises(ExperimentError, match="another run is writing"),
        Metrics.open(tmp_path, HEADER),
    ):
        pass


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with Metrics.open(tmp_path, HEADER) as metrics:
        metrics.add(Record({"seed": 0}, {"loss": float("nan"), "curve": [1.0, float("inf")]}, {}))
    assert read_metrics(tmp_path)[0].values == {"loss": None, "curve": [1.0, None]}


def test_devices() -> None:
    assert available("cpu").type == "cpu"
    with pytest.raises(ExperimentError, match="no device"):
        available("gpu")
    with pytest.raises(ExperimentError, match="cpu or cuda"):
        available("meta")


def test_report_of_a_wrong_folder(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(ExperimentError, match="there is no folder"):
        rows(tmp_path / "nowhere")
    results = tmp_path / "results"
    results.mkdir()
    finished_copy = results / "rings"
    finished_copy.mkdir()
    for name, data in contents(finished).items():
        (finished_copy / name).write_bytes(data)
    with pytest.raises(ExperimentError, match="holds a run of 'table1'"):
        rows(results)


def test_the_command_line_says_it_in_a_line(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["reproduce", "lsita"])
    assert outcome.exit_code == 1
    assert "Did you mean 'lista'" in outcome.output + outcome.stderr
    assert "Traceback" not in outcome.output
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in MODULES)


@pytest.mark.parametrize("values", [[], [1], "x", None, {"gamma": {}}])
def test_a_config_of_another_kind_is_refused(values: Any) -> None:
    with pytest.raises(ExperimentError, match=r"a config gives each setting its value|gamma takes a value"):
        from_json(load("rings").Config, values)


@pytest.mark.parametrize("name", [store.CONFIG, store.METRICS])
def test_json_that_is_nested_too_deeply_is_damaged(finished: Path, name: str) -> None:
    (finished / name).write_bytes(b"[" * 100_000 + b"]" * 100_000 + b"\n")
    with pytest.raises(ExperimentError, match="damaged"):
        store.read_config(finished) if name == store.CONFIG else read_metrics(finished)


def test_a_report_follows_no_link_and_repeats_no_markup(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("secret")
    folder = tmp_path / "runs" / "table1"
    shutil.copytree(finished, folder)
    (folder / FIGURE).unlink(missing_ok=True)
    (folder / FIGURE).symlink_to(tmp_path / "private")
    stored = json.loads((folder / store.CONFIG).read_text())
    stored["command"] = "x` <script>\n# heading"
    (folder / store.CONFIG).write_text(json.dumps(stored))
    found = row("table1", paper()["table1"], folder)
    assert found.figure is None
    text = markdown([found], tmp_path, {})
    assert "`x <script> # heading`" in text
