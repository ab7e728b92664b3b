"""The experiments on images: their smoke presets run, resume exactly, draw, and say what they found."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import broken_off

from retrograde_experiments import accuracy_memory, cifar, finetune, gamma, imagenet, memory_batch, ode
from retrograde_experiments.checkpoint import Checkpoint
from retrograde_experiments.config import from_json, to_json
from retrograde_experiments.errors import ExperimentError
from retrograde_experiments.metrics import Record, read_metrics
from retrograde_experiments.progress import Quiet
from retrograde_experiments.registry import load
from retrograde_experiments.run import Context, reproduce
from retrograde_experiments.train import build
from retrograde_experiments.train.learner import Learner

NAMES = ("cifar", "gamma", "learned-gamma", "accuracy-memory", "ode", "memory-batch", "finetune", "imagenet")


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, tmp_path: Path) -> None:
    experiment = load(name)
    config = experiment.Config.smoke()
    records = reproduce(name, config, tmp_path, Quiet())
    assert [r.key for r in records] == experiment.units(config)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    found = experiment.findings(config, records)
    assert found
    assert len({finding.what for finding in found}) == len(found)
    experiment.figure(config, records[:1])  # an unfinished run
    experiment.findings(config, records[:1])
    assert experiment.findings(config, []) == []


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_written_and_read_and_say_their_setting(name: str) -> None:
    kind = load(name).Config
    for preset in ("smoke", "default", "paper"):
        config = getattr(kind, preset)()
        assert from_json(kind, json.loads(json.dumps(to_json(config)))) == config
        assert len(config.setting()) > 60
    assert "The paper" in kind.default().setting()


def agrees(config: Any, **wanted: Any) -> bool:
    return {name: getattr(config, name) for name in wanted} == wanted


def test_the_papers_settings() -> None:
    table2, large = cifar.Config.paper().recipe(), imagenet.Config.paper().recipe()
    assert agrees(table2, epochs=220, batch=128, rate=0.01, milestones=(180,), weight_decay=5e-4)
    assert agrees(large, epochs=100, batch=256, rate=0.1, milestones=(30, 60, 90), weight_decay=1e-4)
    assert agrees(cifar.Config.paper(), model="resnet101", repeats=10)
    assert agrees(ode.Config.paper(), epochs=120, rate=0.1, milestones=(60,), blocks=10)
    assert agrees(memory_batch.Config.paper(), nets=("resnet152 imagenet", "thin-resnet1202 cifar"))
    assert gamma.Config.paper().refit == 20


@pytest.mark.parametrize(("name", "steps"), [("cifar", 6), ("gamma", 8)])
def test_broken_off_and_resumed_the_metrics_are_the_same(name: str, steps: int, tmp_path: Path) -> None:
    config = load(name).Config.smoke()
    reproduce(name, config, tmp_path / "whole", Quiet(), every=0)
    with broken_off(after=steps):
        reproduce(name, config, tmp_path / "halved", Quiet(), every=0)
    assert len(read_metrics(tmp_path / "halved")) < len(read_metrics(tmp_path / "whole"))
    reproduce(name, config, tmp_path / "halved", Quiet(), every=0)
    one, other = (_values(read_metrics(tmp_path / run)) for run in ("whole", "halved"))
    assert one == other


def _values(records: list[Record]) -> list[dict[str, Any]]:
    """What must be the same: seconds are not."""
    return [{name: value for name, value in record.values.items() if name != "seconds"} for record in records]


def test_the_largest_batch_is_found_to_3_percent() -> None:
    for room in (1, 7, 100, 1000, 5000):
        found = memory_batch.largest_fitting(lambda batch, room=room: batch if batch <= room else None, 1, 4096)  # type: ignore[misc]
        assert min(room, 4096) * 0.96 <= found <= min(room, 4096)
    assert memory_batch.largest_fitting(lambda batch: None, 1, 64) == 0


def test_repeats_side_by_side_share_nothing() -> None:
    config = replace(ode.Config.smoke(), repeats=2, solver="rk4", steps=1, gradient="direct")
    net = ode.Side(config, "second", channels=2, colours=1, classes=10)
    x = torch.randn(4, 2, 8, 8)
    before = net(x)
    changed = x.clone()
    changed[:, 1] += 1  # the image of the second repeat
    after = net(changed)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    net(x)[0].sum().backward()
    assert all(p.grad is not None and not p.grad.chunk(2)[1].any() for p in net.parameters())


def test_a_checkpointed_block_moves_the_statistics_once() -> None:
    torch.manual_seed(0)
    plain, checkpointed = (memory_batch.network("thin-resnet14 cifar", way, 0.9) for way in ("resnet", "checkpoint"))
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        other.data.copy_(one.data)
    x = torch.randn(2, 3, 32, 32)
    outputs = [net(x) for net in (plain, checkpointed)]
    for output in outputs:
        output.sum().backward()
    assert torch.equal(*outputs)
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    means = [[b for name, b in net.named_buffers() if "running" in name] for net in (plain, checkpointed)]
    assert all(torch.equal(a, b) for a, b in zip(*means, strict=True))


def test_momentum_needs_less_memory_than_checkpointing_where_stages_are_deep() -> None:
    config, device = memory_batch.Config.smoke(), torch.device("cpu")
    needed = {}
    for way in memory_batch.WAYS:
        net = memory_batch.network("thin-resnet44 cifar", way, 0.9)
        net(torch.randn(1, 3, 32, 32))  # finds the range, which takes memory of its own
        needed[way] = memory_batch.step_memory(net, 4, 32, 10, replace(config, budget_gb=None), device)
    assert needed["momentum"] < needed["checkpoint"] < needed["resnet"]  # type: ignore[operator]
    assert memory_batch.step_memory(net, 2, 32, 10, replace(config, budget_gb=1e-3), device) is None


def test_statistics_anew_are_the_mean_over_batches() -> None:
    from retrograde_experiments.data.batches import Resident
    from retrograde_experiments.train import Recipe
    from retrograde_experiments.train.unit import small_set

    source = Resident(small_set("digits"), 32, limit=64, augment=False)
    learner = Learner(
        build("thin-resnet8", classes=10, channels=1, gamma=0, memory="store"), Recipe(epochs=1, batch=32), 2
    )
    gamma.statistics_anew(learner, source)
    net: Any = learner.net
    batches = [x.contiguous() for x, _ in source.epoch(0)]
    with torch.no_grad():
        expected = torch.stack([net.conv1(x).mean((0, 2, 3)) for x in batches]).mean(0)
    torch.testing.assert_close(net.bn1.running_mean, expected)
    assert net.bn1.momentum == 0.1


def test_gamma_rises_to_its_value() -> None:
    config = finetune.Config.default()
    rising = [finetune.risen(config, step, 10, 0.9) for step in range(80)]
    assert rising[0] == 0.1
    assert rising == sorted(rising)
    assert set(rising[10 * config.warm :]) == {0.9}


@pytest.fixture(scope="module")
def batches_found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuning whose first phase is over."""
    folder = tmp_path_factory.mktemp("finetune")
    reproduce("finetune", finetune.Config.smoke(), folder, Quiet(), only={"phase": "largest"})
    return folder


def copied_metrics(before: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (to / name).write_bytes((before / name).read_bytes())
    return to


def test_finetuning_goes_on_from_its_metrics_alone(batches_found: Path, tmp_path: Path) -> None:
    """A copy of config.json and metrics.jsonl, without any other file of the run, is enough."""
    config, copied = finetune.Config.smoke(), copied_metrics(batches_found, tmp_path / "copied")
    reproduce("finetune", config, copied, Quiet(), only={"phase": "train", "net": "resnet"})
    done = read_metrics(copied)
    assert [r["phase"] for r in done] == ["largest"] * 3 + ["train"]
    assert done[3]["fits"] == done[0]["largest"] == 32
    with pytest.raises(ExperimentError, match="phase=largest"):
        reproduce("finetune", config, tmp_path / "empty", Quiet(), only={"phase": "train"})


def test_an_epoch_is_timed_with_the_batch_that_was_trained_with(batches_found: Path, tmp_path: Path) -> None:
    """Not with the largest: there the memory may not last."""
    config, run = finetune.Config.smoke(), copied_metrics(batches_found, tmp_path / "run")
    trained = Record({"phase": "train", "net": "momentum", "seed": 0, "gamma": 0.9}, {"fits": 16}, {})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(trained.line() + "\n")
    context = Context(torch.device("cpu"), Quiet(), Checkpoint(run / "unit.pt", 9), run)
    timed = finetune.measure(config, {"phase": "time", "net": "momentum", "batch": "largest", "graph": False}, context)
    assert timed["fits"] == 16
    assert len(timed["epochs"]) == finetune.TIMED
    assert min(timed["epochs"]) <= timed["epoch"] <= max(timed["epochs"])


def tuned(net: str, seed: int, batch: int, accuracy: list[float], seconds: float = 10.0) -> Record:
    values = {
        "fits": batch,
        "reserved": 1,
        "seconds": [seconds * k for k in range(len(accuracy))],
        "accuracy": accuracy,
    }
    return Record(
        {"phase": "train", "net": net, "seed": seed, **({"gamma": 0.9} if net == "momentum" else {})}, values, {}
    )


def test_seconds_are_those_of_an_epoch_alone_where_measured() -> None:
    config = replace(finetune.Config.default(), gammas=(0.9,), warm=0)
    runs = [
        tuned(net, s, batch, [50.0, 80.0, 95.0], 50.0)
        for net, batch in (("resnet", 6), ("momentum", 10))
        for s in range(3)
    ]
    alone = [
        Record(
            {"phase": "time", "net": net, "batch": "largest", "graph": False},
            {"fits": batch, "epochs": [s], "epoch": s},
            {},
        )
        for net, batch, s in (("resnet", 6, 2.0), ("momentum", 10, 3.0))
    ]
    name = "time to 90 %, Momentum less ResNet"
    shared = {f.what: f for f in finetune.findings(config, runs)}
    assert (shared[name].ours, shared[name].met) == ("+0.0 ± 0.0 s (standard error, 3 pairs)", True)
    apart = {f.what: f for f in finetune.findings(config, runs + alone)}
    assert apart[name].ours.startswith("+2.0 ± 0.0 s")
    assert (apart[name].met, apart["time to 90 %, ResNet"].ours) == (False, "4.0 ± 0.0 s")
    assert apart["an epoch at best, Momentum over ResNet"].ours == "1.50×"
    other = [replace(alone[0], values={**alone[0].values, "fits": 5})]  # another batch says nothing
    assert {f.what: f for f in finetune.findings(config, runs + other)}[name].ours == shared[name].ours
    for timed, said, dashed in ((alone, "alone)", 0), (alone[:1], "dashed", 1), ([], "training", 0)):
        axis = finetune.figure(config, runs + timed).axes[1]
        assert said in axis.get_xlabel()
        assert [line.get_linestyle() for line in axis.lines].count("--") == dashed


def test_an_accuracy_counts_once_gamma_has_its_last_value() -> None:
    """Before, the network is hardly a momentum network; and a bar that was missed is said."""
    config = replace(finetune.Config.default(), gammas=(0.9,), warm=2)
    runs = [tuned("resnet", s, 6, [50, 92, 93, 93, 94]) for s in range(3)]
    runs += [tuned("momentum", s, 11 - s // 2, [50, 95, 95, 80, 91 - 2 * (s == 0)]) for s in range(3)]
    runs += [tuned("reference", s, 4 - s, [50, 60, 70, 70, 60]) for s in range(2)]
    found = {f.what: f for f in finetune.findings(config, runs)}
    assert found["time to 90 %, Momentum ResNet, γ = 0.9"].ours == "2 of 3 seeds reach it"
    assert found["time to 90 %, ResNet"].ours == "10.0 ± 0.0 s"
    assert (
        found["last accuracy, Momentum ResNet, γ = 0.9, less the ResNet's"].ours
        == "-3.7 ± 0.7 % (standard error, 3 pairs)"
    )
    later = found["time to 90 %, Momentum less ResNet"]
    assert (later.ours, later.met) == ("2 seeds reach it, 3 of the ResNet's", False)
    assert found["last accuracy, momentumnet 0.10"].ours == "60.0 ± 0.0 % (2 of 3 seeds)"
    labels = [text.get_text() for text in finetune.figure(config, runs).axes[1].get_legend().get_texts()]
    assert labels[1:] == ["Momentum ResNet, γ = 0.9, batch 10, 11", "momentumnet 0.10, batch 3, 4 (2 of 3 seeds)"]


def test_the_reference_package_computes_what_ours_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """He's blocks return relu(x + f(x)): `is_residual` would add that to x."""
    momentumnet = pytest.importorskip("momentumnet")
    config = replace(finetune.Config.smoke(), depth=18, pretrained=False)
    reference, ours = (finetune.network(config, net, 4, 0).eval() for net in ("reference", "momentum"))
    assert momentumnet
    finetune.set_gamma(ours, finetune.REFERENCE)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        a, b = reference(x), ours(x)
    assert (a - b).norm() < 1e-4 * b.norm()


def test_the_state_in_16_bits_beside_the_usual_one() -> None:
    config = replace(accuracy_memory.Config.default(), gammas=(0.0, 0.9))
    units = accuracy_memory.units(config)
    assert len(units) == 2 + 2 + 3
    assert [u["seed"] for u in units if u.get("bits") == 16] == [0, 1, 2]
    slim = {0: 91.0, 1: 91.4, 2: 91.2}
    records = [
        Record(u, {"accuracy": slim[u["seed"]] if "bits" in u else 91.5 + u["seed"] / 10, "peak": 100, "held": 1}, {})
        for u in units
    ]
    found = {f.what: f for f in accuracy_memory.findings(config, records)}
    assert found["16 bits less 32, γ = 0.9"].ours == "-0.40 ± 0.10 % (standard error, 3 pairs)"
    assert found["16 bits less 32, γ = 0.9"].met is True  # from -0.83 % on
    assert found["accuracy, γ = 0.9"].ours == "91.60 ± 0.10 %"  # of the usual state alone
    fewer = {f.what: f for f in accuracy_memory.findings(config, [r for r in records if r["seed"] < 2])}
    assert fewer["16 bits less 32, γ = 0.9"].met is None
    assert fewer["accuracy with 16 bits, γ = 0.9"].ours == "91.20 ± 0.28 % (2 of 3 seeds)"
    accuracy_memory.figure(config, [r for r in records if "bits" in r.key])


def test_what_holds_for_the_accuracy_over_memory() -> None:
    config = accuracy_memory.Config.default()
    rows = [(0.0, 92.0, 900), (0.25, 91.9, 300), (0.9, 92.0, 200)]
    records = [
        Record({"gamma": g, "seed": s}, {"accuracy": a + 0.1 * s + 0.01 * (s == 1) * g, "peak": p}, {})
        for g, a, p in rows
        for s in range(3)
    ]
    told = {f.what: f.met for f in accuracy_memory.findings(config, records)}
    assert told["accuracy, best γ less worst (0.9, 0.25)"] is True
    worse = records + [
        Record({"gamma": 0.5, "seed": s}, {"accuracy": 80.0 + 0.1 * s * s, "peak": 250}, {}) for s in range(3)
    ]
    assert {f.what: f.met for f in accuracy_memory.findings(config, worse)}[
        "accuracy, best γ less worst (0.9, 0.5)"
    ] is False


def test_thin_networks_have_a_width() -> None:
    narrow, wide = (build(name, classes=10, gamma=0.9) for name in ("thin-resnet14", "thin-resnet14x2"))
    assert [m.out_channels for m in (narrow.conv1, wide.conv1)] == [16, 32]  # type: ignore[union-attr]
    assert sum(p.numel() for p in wide.parameters()) > 3.5 * sum(p.numel() for p in narrow.parameters())
    for name in ("resnet18x2", "revnet18x2", "thin-resnet14x0", "thin-resnet14x"):
        with pytest.raises(ExperimentError, match="thin-resnet"):
            build(name, classes=10)


def test_gamma_tells_what_an_unfinished_run_has() -> None:
    """A network tested with γ = 0.9 where none has been trained with that: there is nothing to compare a refit with."""
    config = replace(gamma.Config.smoke(), gammas=(0.0, 0.9, 1.0))
    values = {"plain": 20.0, "statistics": 30.0, "refit": 80.0}
    records = [
        Record({"train": 0.0, "test": 0.0, "seed": 0}, {"accuracy": 82.0}, {}),
        Record({"train": 0.0, "test": 0.9, "seed": 0}, values, {}),
        Record({"train": 0.0, "test": 1.0, "seed": 0}, values, {}),
    ]
    told = {f.what: f.met for f in gamma.findings(config, records)}
    assert "most lost from γ = 0, refit" not in told
    trained = [Record({"train": g, "test": g, "seed": 0}, {"accuracy": a}, {}) for g, a in ((0.9, 80.5), (1.0, 90.0))]
    told = {f.what: (f.ours, f.met) for f in gamma.findings(config, [*records, *trained])}
    assert told["most lost from γ = 0, refit"] == ("10.00 % (at γ′ = 1)", False)
    assert told["most lost from γ = 0, refit, γ′ < 1"] == ("0.50 % (at γ′ = 0.9)", True)
    assert gamma.figure(config, records)


def test_cifar_draws_what_there_is() -> None:
    """A loss that was not finite, which is null in the metrics; a data set of which nothing has been run."""
    config = replace(cifar.Config.default(), data=("cifar10", "cifar100"))
    curve = {"accuracy": [10.0, 20.0], "test_loss": [2.3, None], "final": 20.0}
    assert cifar.figure(config, [Record({"data": "cifar10", "net": "resnet", "seed": 0}, curve, {})])
