"""A run killed at any moment goes on, and ends with the metrics of one that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.nets.resnet import thin_resnet
from retrograde_experiments import dynamics, lista, rings
from retrograde_experiments.checkpoint import Checkpoint, restore, state_of
from retrograde_experiments.progress import Quiet
from retrograde_experiments.run import Context

RUN = """
import os
import sys
from pathlib import Path
import torch
from retrograde_experiments.config import override, preset
from retrograde_experiments.progress import Quiet
from retrograde_experiments.registry import load
from retrograde_experiments.run import reproduce

class Told(Quiet):
    def step(self, note=""):
        print("step", flush=True)

name, *changes = sys.argv[1:]
torch.set_num_threads(1)
config = override(preset(load(name).Config, "smoke"), changes)
for out in sys.stdin:
    child = os.fork()
    if not child:
        print("process", os.getpid(), flush=True)
        reproduce(name, config, Path(out.strip()), Told(), every=0.0)
        sys.exit()
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
CHANGES = ["steps=15", "repeats=2", "points=20", "test_points=50", "drawn=8"]


class Runs:
    """Runs one after the other, each in a process of its own, forked from one that has imported all: that takes the seconds."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", RUN, "rings", *CHANGES]
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, out: Path, kill_at: int | None = None, after: float = 0.0) -> int:
        """The exit code of a run, killed so many seconds after its step `kill_at`."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(out, file=self.server.stdin, flush=True)
        process, seen = 0, 0
        for text in self.server.stdout:
            what, *number = text.split()
            if what == "exit":
                return int(number[0])
            process = int(number[0]) if what == "process" else process
            seen += what == "step"
            if what == "step" and seen == kill_at:
                time.sleep(after)
                os.kill(process, signal.SIGKILL)
        raise AssertionError("the server is gone")


@pytest.fixture
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    runs.server.communicate()


def lines(out: Path) -> list[str]:
    """The metrics, without when and where."""
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({"key": line["key"], "values": line["values"]}) for line in read]


def test_killed_at_ten_random_moments(runs: Runs, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert runs.run(whole) == 0
    moments = random.Random(0)
    for _ in range(10):
        step = moments.randrange(1, 6)  # within a unit and between units
        # anywhere within the step, the checkpoint or the line
        assert runs.run(broken, step, moments.random() * 0.004) == -signal.SIGKILL
    assert runs.run(broken) == 0
    assert lines(broken) == lines(whole)
    assert list((broken / "checkpoints").iterdir()) == []


class Killed(Exception):
    pass


class Dies(Quiet):
    """Ends the unit after some steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def step(self, note: str = "") -> None:
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.mark.parametrize(
    ("module", "unit", "after"),
    [
        (dynamics, {"net": "momentum", "seed": 0}, 7),
        (rings, {"net": "momentum", "seed": 0}, 7),
        (lista, {"net": "momentum", "depth": 3}, 5),
        (lista, {"net": "revnet", "depth": 2}, 5),
    ],
)
def test_each_trained_unit_resumes_to_the_same_bits(module, unit, after: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = module.Config.smoke()
    if module is dynamics:
        config = module.Config(steps=12, points=11, drawn=3)

    def run(name: str, progress: Quiet) -> dict:
        context = Context(torch.device("cpu"), progress, Checkpoint(tmp_path / name, every=0.0), tmp_path)
        return module.measure(config, unit, context)

    whole = run("whole.pt", Quiet())
    with pytest.raises(Killed):
        run("broken.pt", Dies(after))
    assert (tmp_path / "broken.pt").exists()
    assert run("broken.pt", Quiet()) == whole


def test_the_range_is_part_of_the_state() -> None:
    """Two networks with the same parameters and different ranges compute different bits: `state_of` must carry both."""
    torch.manual_seed(0)
    net = rg.MomentumNet([nn.Linear(3, 3) for _ in range(4)], memory="store").train()
    net(torch.full((2, 3), 1000.0))
    state, x = state_of(net), torch.randn(2, 3)
    expected = net(x)
    fresh = rg.MomentumNet([nn.Linear(3, 3) for _ in range(4)], memory="store").train()
    restore(fresh, state)
    assert torch.equal(fresh(x), expected)
    anew = rg.MomentumNet([nn.Linear(3, 3) for _ in range(4)], memory="store").train()
    anew.load_state_dict(net.state_dict())
    assert not torch.equal(anew(x), expected)


def test_the_range_of_a_momentum_stage_is_part_of_the_state() -> None:
    """A stage keeps its network out of the module tree; its range must be found all the same."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return thin_resnet(14, gamma=0.9, memory="store").train()

    net, x = made(), torch.randn(2, 3, 8, 8)
    for factor in (1024, 1 / 1024):  # a pass with large activations
        with torch.no_grad():
            net.get_parameter("bn1.weight").mul_(factor)
        if factor > 1:
            net(x)
    state = state_of(net)
    assert [name for name, kept in state["ranges"].items() if kept] == ["layer1", "layer2", "layer3"]
    expected = net(x)
    fresh = made()
    restore(fresh, state)
    assert torch.equal(fresh(x), expected)
    anew = made()
    anew.load_state_dict(state["parameters"])
    assert not torch.equal(anew(x), expected)
