"""`retrograde demo`: it runs, shows measured figures, and refuses what makes no sense."""

import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from retrograde.cli import demo
from retrograde.cli.app import app


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("demo")
    return run("--quick", "--out", str(out / "new")), out / "new" / "demo.png"


def test_it_saves_the_figure_and_says_where(quick: tuple[Result, Path]) -> None:
    result, figure = quick
    assert result.exit_code == 0, result.output
    assert f"Figure: {figure}" in result.output.replace("\n", " ")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size < 150_000


def test_table_is_aligned_and_complete_in_80_columns(quick: tuple[Result, Path]) -> None:
    lines = quick[0].output.splitlines()
    rule = next(k for k, line in enumerate(lines) if line.strip() and set(line.strip()) == {"─"})
    rows = lines[rule + 1 : rule + 4]
    assert [row.split("  ")[0].strip() for row in rows] == list(demo.WAYS)
    pattern = r"\d+\.\d% +\d\.\d\d +\d+\.\d [kM]B +\d\.\d\d +\d+\.\d m?s +\d+\.\d\d *$"
    assert all(re.search(pattern, row) for row in rows), rows
    assert len({len(row.rstrip()) for row in rows}) == 1
    assert max(map(len, lines)) <= 80


def test_a_quick_run_learns_the_digits(outcome: demo.Outcome) -> None:
    assert all(result.accuracy[-1] > 0.8 for result in outcome.results.values())


def test_the_next_command_stands_on_a_line_of_its_own(quick: tuple[Result, Path]) -> None:
    lines = [line.strip() for line in quick[0].output.splitlines()]
    command = lines[lines.index("Next:") + 1]
    assert command.endswith(" demo --depth 100")
    assert run(*command.split()[2:], "--epochs", "0").exit_code == 2  # it is this command, and takes that option


def test_stopped_by_ctrl_c_it_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", stopped)
    result = run()
    assert result.exit_code == 130
    assert "Stopped. Nothing was kept: the same command starts again" in result.output


class Silent:
    def planned(self, steps: int) -> None: ...
    def stepped(self, way: str, loss: float) -> None: ...
    def tested(self, way: str, accuracy: float) -> None: ...
    def measuring(self, depths: list[int]) -> None: ...


@pytest.fixture(scope="module")
def outcome() -> demo.Outcome:
    return demo.run(demo.quick(demo.Setting(depth=3, seed=1)), Silent())


def test_plain_and_checkpointed_training_are_the_same_training(outcome: demo.Outcome) -> None:
    plain, checkpointed, momentum = outcome.results.values()
    assert plain.loss == pytest.approx(checkpointed.loss, rel=1e-4)
    assert plain.loss != pytest.approx(momentum.loss, rel=1e-4)


def test_every_step_is_timed(outcome: demo.Outcome) -> None:
    steps = outcome.setting.epochs * (1438 // outcome.setting.batch)
    assert all(len(result.seconds) == steps for result in outcome.results.values())


def test_memory_grows_with_depth_except_in_reverse(outcome: demo.Outcome) -> None:
    element = 4 * 64 * 16 * 8 * 8
    grown = [(result.peaks[12] - result.peaks[4]) / 8 / element for result in outcome.results.values()]
    assert grown[0] > 4  # conv, norm, ReLU, conv and norm each keep their input
    assert 1 <= grown[1] < 1.5  # the block's input
    assert grown[2] < 0.1
    assert all(result.peak == result.peaks[3] for result in outcome.results.values())


def test_networks_start_from_the_same_weights_and_leave_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    plain, *others = (list(network.parameters()) for network in demo.build(2, seed=0).values())
    assert torch.equal(torch.get_rng_state(), before)
    for other in others:
        assert all(torch.equal(a, b) and a is not b for a, b in zip(plain, other, strict=True))


def test_the_seed_fixes_the_weights() -> None:
    first, again, other = (demo.build(1, seed)["plain"][0][0].weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_and_test_images_are_apart() -> None:
    data = demo.load_digits(0)
    assert (len(data.train_x), len(data.test_x)) == (1438, 359)
    assert data.train_x.shape[1:] == (1, 8, 8)
    assert float(data.train_x.max()) == 1


@pytest.mark.parametrize("option", ["--epochs", "--depth"])
def test_depth_and_epochs_below_one_are_refused(option: str) -> None:
    result = run(option, "0")
    assert result.exit_code == 2
    assert option in result.output
    with pytest.raises(ValueError, match=f"must be at least 1; got .*{option[2:]}=0"):
        demo.Setting(**{option[2:]: 0})


def test_a_package_that_is_used_after_training_is_missed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = run()
    assert result.exit_code == 1
    (line,) = result.output.strip().splitlines()
    assert line.startswith("Error: ")
    assert 'needs matplotlib, not found here: pip install "retrograde[cli]"' in line
