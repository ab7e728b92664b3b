"""`retrograde train` for research: other models and optimizers, first weights, γ schedules, seeds, config files, comparisons."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import broken_off
from safetensors.torch import load_file, save_file
from torch import nn

import retrograde as rg
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.train.compare import main as compare
from retrograde_experiments.train.compare import table
from retrograde_experiments.train.learner import Learner, compile_blocks
from retrograde_experiments.train.logs import read_log
from retrograde_experiments.train.models import outside, start_from
from retrograde_experiments.train.run import main, train
from retrograde_experiments.train.setting import Recipe, Setting, parse

SMALL: dict[str, Any] = {
    "model": f"{__name__}:small", "data": "digits", "limit": 96, "epochs": 1, "batch": 32, "rate": 0.05, "schedule": "constant",
    "tensorboard": False, "device": "cpu", "memory": "reverse", "gamma": 0.5,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "gamma": 0.5, "velocity": "zero", "memory": "reverse", "verify": "auto", "overflow": "raise", "fixed_point": "auto",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.relu(self.conv(x)))


def small(num_classes: int) -> nn.Module:
    """A model of one's own."""
    blocks = nn.Sequential(*[Block(8) for _ in range(4)])
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    )


def setting(out: Path, **changes: Any) -> Setting:
    return Setting(**{**SMALL, "out": str(out), **changes})


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet34", f"{__name__}:small"])
def test_any_model_is_converted(name: str) -> None:
    channels = 3 if name.startswith("torchvision") else 1
    net = outside(name, classes=7, shape=(channels, 32, 32), **COMMON)
    assert rg.GammaSchedule(net, {0: 1}).gamma == Fraction(1, 2)  # it is a converted model
    assert net(torch.randn(2, channels, 32, 32)).shape == (2, 7)
    plain = outside(name, classes=7, shape=(channels, 32, 32), **{**COMMON, "gamma": 0.0, "memory": "store"})
    assert plain.state_dict().keys() == net.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torchvision:resnet1899", "cannot be made"), ("no.such.module:f", "cannot be made"), ("math:sqrt", "cannot be made"),
        (f"{__name__}:setting", "cannot be made"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_there_is_named(name: str, said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        outside(name, classes=7, shape=(1, 8, 8), **COMMON)


def test_a_run_of_ones_own_model_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """With AdamW, clipping and a γ schedule, whose position is part of the run."""
    more: dict[str, Any] = {
        "optimizer": "adamw", "optimizer_options": ("betas=(0.9, 0.95)",), "clip": 1.0, "rate": 1e-3, "epochs": 2,
        "gamma_schedule": ("0:0", "4:1"), "checkpoint_every": 1,
    }  # fmt: skip
    train(setting(tmp_path / "whole", **more), shown=False)
    with broken_off(after=4):
        train(setting(tmp_path / "halved", **more), shown=False)
    train(setting(tmp_path / "halved", **more), shown=False)
    one, other = (load_file(tmp_path / run / "net.safetensors") for run in ("whole", "halved"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len((tmp_path / "halved" / "environment.jsonl").read_text().splitlines()) == 2


def test_gamma_follows_its_schedule() -> None:
    net = outside(f"{__name__}:small", classes=10, shape=(1, 8, 8), **COMMON)
    learner = Learner(net, Recipe(epochs=1, batch=4), steps=4)
    learner.gammas({0: 0, 2: 1})
    assert learner.schedule is not None
    found = [float(learner.schedule.gamma)]
    for _ in range(3):
        learner.step(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
        found.append(float(learner.schedule.gamma))
    assert found == [0, 0.25, 0.5, 0.5]
    plain = Learner(small(10), Recipe(epochs=1, batch=4), steps=4)
    with pytest.raises(ExperimentError, match="gamma-schedule"):
        plain.gammas({0: 0, 2: 1})


def test_gradients_are_clipped() -> None:
    torch.manual_seed(0)
    net = small(10)
    learner = Learner(
        net,
        Recipe(epochs=1, batch=4, rate=1.0, momentum=0.0, weight_decay=0.0, clip=1e-3, schedule="constant"),
        steps=4,
    )
    before = [p.detach().clone() for p in net.parameters()]
    learner.step(torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64))
    moved = torch.cat([(p - b).flatten() for p, b in zip(net.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("name", "options"), [("adamW", ("eps=1e-6",)), ("RMSprop", ()), ("sgd", ("dampening=0.1",))])
def test_optimizers_are_those_of_torch(name: str, options: tuple[str, ...]) -> None:
    learner = Learner(small(10), Recipe(optimizer=name, optimizer_options=options), steps=1)
    assert type(learner.optimizer).__name__.lower() == name.lower()
    assert all(learner.optimizer.defaults[o.split("=")[0]] == float(o.split("=")[1]) for o in options)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [("adamx", (), "Did you mean"), ("adamw", ("momentum=0.9",), "momentum"), ("adamw", ("eps=x",), "eps")],
)
def test_a_wrong_optimizer_is_refused(name: str, options: tuple[str, ...], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        Learner(small(10), Recipe(optimizer=name, optimizer_options=options), steps=1)


def test_weights_to_start_from(tmp_path: Path) -> None:
    kept, net = small(3), small(10)
    save_file(kept.state_dict(), tmp_path / "kept.safetensors")
    torch.save({"state_dict": kept.state_dict()}, tmp_path / "kept.pt")
    for name in ("kept.safetensors", "kept.pt"):
        assert start_from(net, tmp_path / name) == ["4.weight", "4.bias"]  # the head is for other classes
        assert torch.equal(net.state_dict()["0.weight"], kept.state_dict()["0.weight"])
    with pytest.raises(ExperimentError, match="--init"):
        start_from(net, tmp_path / "none.pt")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ExperimentError, match="no entry that fits"):
        start_from(net, tmp_path / "other.safetensors")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler at its import
def test_converted_blocks_are_compiled() -> None:
    """--compile of an own model: each of its blocks goes through the compiler, and nothing else of it."""
    net = small(10)
    rg.convert(net, torch.zeros(2, 1, 8, 8), memory="reverse")
    compile_blocks(net)
    assert [block.__dict__["_retrograde_place"].compile for block in net[1]] == [
        {}
    ] * 4  # each of them, with no options


def test_top5_and_the_best_weights(tmp_path: Path) -> None:
    train(setting(tmp_path, epochs=3), shown=False)
    lines = [line for line in read_log(tmp_path) if "accuracy" in line]
    assert all(line["accuracy"] <= line["top5"] <= 100 for line in lines)
    best = max(lines, key=lambda line: line["accuracy"])
    own, kept = load_file(tmp_path / "net.safetensors"), load_file(tmp_path / "best.safetensors")
    same = all(torch.equal(own[name], kept[name]) for name in own)
    assert same == (best["accuracy"] > max(line["accuracy"] for line in lines[:-1]))


def test_epochs_can_be_extended_where_the_rate_allows_it(tmp_path: Path) -> None:
    train(setting(tmp_path / "whole", epochs=2), shown=False)
    train(setting(tmp_path / "longer", epochs=1), shown=False)
    train(setting(tmp_path / "longer", epochs=2), shown=False)
    one, other = (load_file(tmp_path / run / "net.safetensors") for run in ("whole", "longer"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    train(setting(tmp_path / "cosine", schedule="cosine"), shown=False)
    with pytest.raises(ExperimentError, match="cannot go on to 2"):
        train(setting(tmp_path / "cosine", schedule="cosine", epochs=2), shown=False)
    with pytest.raises(ExperimentError, match="another setting"):
        train(setting(tmp_path / "whole", epochs=1), shown=False)


def test_settings_come_from_a_file_and_options_override_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "thin-resnet8"\nepochs = 7\nmilestones = [2, 3]\nbatch = 64\n')
    found = parse(["--config", str(path), "--batch", "32"])
    assert (found.model, found.epochs, found.milestones, found.batch, found.rate) == (
        "thin-resnet8",
        7,
        (2, 3),
        32,
        0.01,
    )
    (tmp_path / "setting.json").write_text(json.dumps({"epochs": 3}))
    assert parse(["--config", str(tmp_path / "setting.json")]).epochs == 3
    path.write_text("epoch = 7\n")
    with pytest.raises(SystemExit):
        parse(["--config", str(path)])


def test_seeds_are_trained_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--data", "digits", "--limit", "96", "--epochs", "1", "--batch", "32", "--schedule", "constant", "--no-tensorboard",
              "--device", "cpu", "--model", f"{__name__}:small", "--memory", "store", "--seeds", "0", "1", "2"]  # fmt: skip
    main([*common, "--gamma", "0", "--out", str(tmp_path / "plain")])
    main([*common, "--gamma", "0.5", "--out", str(tmp_path / "momentum")])
    said = capsys.readouterr().out
    assert "±" in said
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == ["seed-0", "seed-1", "seed-2"]
    shown = table([tmp_path / "plain", tmp_path / "momentum"], "accuracy").splitlines()
    assert "(3 pairs)" in shown[3]
    assert " to " in shown[3]
    with pytest.raises(SystemExit, match="holds no run"):
        compare([str(tmp_path / "none")])


def test_a_sweep_trains_every_combination_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--data", "digits", "--limit", "96", "--epochs", "1", "--batch", "32", "--schedule", "constant", "--no-tensorboard",
              "--device", "cpu", "--model", f"{__name__}:small", "--memory", "store", "--out", str(tmp_path)]  # fmt: skip
    sweep = ["--sweep", "rate=0.01,1e30", "gamma=0,0.5"]
    with pytest.raises(SystemExit) as ended:
        main([*common, *sweep, "--seeds", "0", "1"])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"rate={rate},gamma={gamma}" for rate in ("0.01", "1e30") for gamma in ("0", "0.5")
    )
    first, *rest = said.out.splitlines()[2:]
    assert "rate=0.01" in first
    assert " ± " in first
    assert sum("rate=1e30" in line for line in rest) == 2
    assert "the loss is not a number" in said.err
    alone = tmp_path / "alone"
    main([*common[:-1], str(alone), "--rate", "0.01", "--gamma", "0.5", "--seed", "1"])
    one, other = (load_file(p / "net.safetensors") for p in (tmp_path / "rate=0.01,gamma=0.5" / "seed-1", alone))
    assert all(torch.equal(one[name], other[name]) for name in one)
    for wrong, told in (
        ("rat=1", "Did you mean 'rate'"),
        ("rate", "name=value,value"),
        ("rate=fast", "'fast' is no float"),
        ("channels_last=yes", "true or false"),
        ("milestones=1,2", "several values"),
    ):
        with pytest.raises(SystemExit, match=told):
            main([*common, "--sweep", wrong])
    with pytest.raises(SystemExit, match="twice"):
        main([*common, "--sweep", "rate=1", "rate=2"])


def test_a_wrong_schedule_of_gamma_is_refused() -> None:
    with pytest.raises(ValueError, match="step:share"):
        Setting(gamma_schedule=("0-1",))
