"""The runner, on the small twins of its cases: what it measures, what it records when a method fails, what it checks."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import retrograde as rg
import retrograde_bench.runner as runner
from command_line import app
from retrograde_bench import record, resident
from retrograde_bench.cases import Case, cases
from retrograde_bench.methods import Method, Setup, choose, method, standard
from retrograde_bench.notation import Ours, described, parsed
from retrograde_bench.record import Row
from retrograde_bench.runner import Options, run_case
from retrograde_bench.step import Agreement, largest_batch, memory, training_step, zero_gradients

MODES = tuple(f"ours[memory={mode}]" for mode in ("reverse", "checkpoint", "store", "auto"))
EAGER = ("plain", "checkpoint", "checkpoint-to-end", "checkpoint-sqrt", "selective", *MODES)


def quiet(text: str) -> None:
    pass


def prepared(name: str) -> tuple[Case, Setup, Tensor]:
    case = cases("smoke", [name])[0]
    setup = Setup(case, case.network(), 0.9, "aot_eager_decomp_partition")
    x = case.inputs(case.batch, "cpu")
    zero_gradients(setup, x)
    return case, setup, x


def gradients(name: str, setup: Setup, x: Tensor) -> list[Tensor]:
    m = method(name)
    zero_gradients(setup, x)
    training_step(m, m.build(setup), x, setup.case)()
    leaves = [leaf for leaf in [*setup.network.parameters(), x] if leaf.requires_grad]
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("transformer-L24-bf16", EAGER),
        (
            "resnet152-64-fp32",
            ("plain", "checkpoint", *MODES[3:], "ours[memory=auto,form=relu]", "ours[memory=auto,by=convert]"),
        ),
        ("conv-16", ("plain", "checkpoint", "ours[memory=reverse,form=branch]")),
        ("mlp-50", ("plain", "checkpoint", "ours[memory=reverse,form=branch]")),
        ("resnet1202-128-fp32", ("plain", "checkpoint", "ours[memory=reverse]")),
    ],
)
def test_every_eager_method_is_measured(name: str, names: tuple[str, ...]) -> None:
    case = cases("smoke", [name])[0]
    rows = {row.method: row for row in run_case(case, Options(names, repeats=2, warmup=0), quiet)}
    assert set(rows) == set(names)
    for row in rows.values():
        assert row.status == "ok", (row.method, row.note)
        assert row.repeats == 2
        assert row.median is not None
        assert row.lower is not None
        assert row.best is not None
        assert row.best <= row.lower <= row.median
        assert row.peak
        assert row.held is not None
        assert 0 < row.held < row.peak
        assert row.time_ratio == row.median / rows["checkpoint"].median  # type: ignore[operator]
        assert row.memory_ratio == row.peak / rows["checkpoint"].peak  # type: ignore[operator]
        assert row.gradients == ("equal" if row.method.startswith("ours") else "")
    stored, again = rows["plain"].peak, rows["checkpoint"].peak
    assert stored is not None
    assert again is not None
    assert stored > again


@pytest.mark.parametrize("name", ["transformer-L96-fp32", "resnet152-64-fp32"])
def test_the_plain_family_computes_the_same_gradients(name: str) -> None:
    """Checkpointing, in segments or selectively, is the same network on the same weights."""
    _, setup, x = prepared(name)
    expected = gradients("plain", setup, x)
    assert any(g.any() for g in expected)
    for other in ("checkpoint", "checkpoint-sqrt", "selective"):
        for a, b in zip(gradients(other, setup, x), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_the_branch_is_the_block_without_its_residual() -> None:
    _, setup, x = prepared("transformer-L96-fp32")
    stage = setup.network.stages[0]
    for block, branch in zip(stage.blocks, stage.branches(), strict=True):  # type: ignore[arg-type, operator]
        torch.testing.assert_close(x + branch(x), block(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own, by version
def test_every_compiled_method_compiles_like_blocks_once() -> None:
    from torch._dynamo.utils import counters

    _, setup, x = prepared("transformer-L96-fp32")
    for name in ("compile-budget", "checkpoint-compiled"):
        counters.clear()
        m = method(name)
        step = training_step(m, m.build(setup), x, setup.case)
        step()
        step()
        assert counters["stats"]["unique_graphs"] == 1, name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_budget_of_activations_saves_memory() -> None:
    """The methods' compiled functions are apart: what was compiled under a budget is not what is compiled without."""
    _, setup, x = prepared("transformer-L96-fp32")
    budget = method("compile-budget")
    free = dataclasses.replace(budget, around=Method("", "", budget.build).around)
    peaks = []
    for m, fresh in ((budget, setup), (free, dataclasses.replace(setup, functions={}))):
        step = training_step(m, m.build(fresh), x, fresh.case)
        step()
        peaks.append(memory(step, torch.device("cpu")).peak)
    assert peaks[0] < 0.9 * peaks[1]


def failing(error: Exception) -> Method:
    def build(setup: Setup) -> nn.Module:
        raise error

    return Method("failing", "", build)


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("no memory"), "out of memory"), (KeyError("broken"), "raised")]
)
def test_a_failure_is_a_row(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [failing(error), method("plain")]
    monkeypatch.setattr(runner, "choose", lambda *given: kept)
    rows = list(run_case(cases("smoke", ["L24"])[0], Options(repeats=1, warmup=0), quiet))
    assert [(row.method, row.status) for row in rows] == [("failing", status), ("plain", "ok")]


def test_a_failure_in_the_rounds_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weak(nn.Module):
        """Runs for two warm-ups and two measurements of memory, then no more."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 4:
                raise RuntimeError("worn out")
            return x * 1.0

    monkeypatch.setattr(runner, "choose", lambda *given: [Method("weak", "", lambda setup: Weak()), method("plain")])
    rows = {r.method: r for r in run_case(cases("smoke", ["L24"])[0], Options(repeats=2, warmup=1), quiet)}
    assert rows["weak"].status == "raised"
    assert "worn out" in rows["weak"].note
    assert rows["plain"].repeats == 2


def test_packages_that_are_missing_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("momentumnet", "revlib", "memcnn"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    names = ("momentumnet", "revlib", "memcnn")
    rows = list(run_case(cases("smoke", ["L24"])[0], Options(names, repeats=1, warmup=0), quiet))
    assert [(row.method, row.status) for row in rows] == [(name, "not run") for name in names]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_graphs_are_asked_for_by_name_and_need_cuda() -> None:
    case = cases("smoke", ["L24"])[0]
    assert not any(m.graphed for m in choose(case))
    rows = list(run_case(case, Options(("plain[step=graph]",), repeats=1, warmup=0), quiet))
    assert [(row.status, row.note) for row in rows] == [("not run", "CUDA graphs need a CUDA device")]


class Restless(nn.Module):
    """Another function at every call: no replay repeats it."""

    calls = 0

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        Restless.calls += 1
        return self.block(x) * (1 + 1e-3 * Restless.calls)


def test_gradients_that_differ_are_seen() -> None:
    case, setup, x = prepared("transformer-L96-fp32")
    stage = setup.network.stages[0]
    stage.blocks[1] = Restless(stage.blocks[1])  # type: ignore[index, operator]
    m = method("ours[memory=reverse]")
    with pytest.MonkeyPatch.context() as patch:  # by default the network itself would raise
        patch.setattr(rg, "MomentumNet", partial(rg.MomentumNet, verify="off"))
        assert Agreement(x).check(m, setup, m.build(setup)).startswith("differs in")
    assert case.name == setup.case.name


def test_a_twin_that_does_not_fit_is_stood_in_for() -> None:
    _, setup, x = prepared("transformer-L96-fp32")
    m = method("ours[memory=reverse]")
    whole = m.twin
    assert whole is not None

    def twin(setup: Setup, mode: str) -> nn.Module:
        if mode == "store":
            raise torch.OutOfMemoryError("no memory")
        return whole(setup, mode)

    assert Agreement(x).check(dataclasses.replace(m, twin=twin), setup, m.build(setup)) == "equal, against checkpoint"


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    case, setup, _ = prepared("transformer-L96-fp32")
    m, limit = method("checkpoint"), 2_000_000

    def total(batch: int) -> int:
        x = case.inputs(batch, "cpu")
        zero_gradients(setup, x)
        step = training_step(m, m.build(setup), x, case)
        step()
        held = 2 * sum(p.nbytes for p in setup.network.parameters()) + 2 * x.nbytes
        return held + memory(step, torch.device("cpu")).peak

    best = largest_batch(m, setup, limit)
    assert total(best) <= limit < total(best + max(2, best // 10))


def test_a_run_adds_rows_to_a_table_and_says_how_it_goes(tmp_path: Path) -> None:
    table, figure = tmp_path / "table.csv", tmp_path / "figure.png"
    chosen = ["--cases", "16k", "--cases", "L96-fp32", "--methods", "plain,checkpoint,ours[memory=reverse,form=branch]"]
    arguments = ["bench", *chosen, "--repeats", "1", "--device", "cpu", "--out", str(table)]
    told = CliRunner().invoke(app, arguments).output
    assert "case 2 of 2" in told
    assert "round 1 of 1" in told
    assert "ours[memory=reverse,form=branch]" in told
    first = record.read(table)
    assert len(first) == 6
    assert {row.status for row in first} == {"ok"}
    told = CliRunner().invoke(app, [*arguments, "--figure", str(figure)]).output
    assert "6 rows added" in told
    assert record.read(table)[:6] == first  # rows are added, never changed
    assert len(record.read(table)) == 12
    assert len(record.latest(record.read(table))) == 6
    assert figure.stat().st_size > 10_000
    for row in first:
        assert row.versions.startswith("torch ")
        assert row.host
        assert str(tmp_path) not in row.command


def test_wrong_methods_are_refused_before_anything_runs(tmp_path: Path) -> None:
    refused = CliRunner().invoke(
        app, ["bench", "--methods", "plain,ours[memory=revers]", "--out", str(tmp_path / "t.csv")]
    )
    assert refused.exit_code == 1
    assert "memory must be one of reverse, checkpoint, store, auto or a share" in str(refused.exception)
    assert not (tmp_path / "t.csv").exists()


def test_resident_memory_is_that_of_a_fresh_process() -> None:
    assert resident.growth("mlp-400", "smoke", "plain", 0.9) >= 0
    with pytest.raises(RuntimeError, match="no method is called 'plainly'"):
        resident.growth("mlp-400", "smoke", "plainly", 0.9)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts as Linux does")
def test_resident_memory_counts_what_was_let_go_again() -> None:
    """In a fresh process: an older one hands out pages that are resident already."""
    program = "\n".join(
        (
            "import torch",
            "from retrograde_bench.resident import resident",
            "torch.ones(1)",
            "start = resident(reset=True)",
            "torch.ones(40_000_000).sum()",
            "print(resident(peak=True) - start)",
        )
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150e6


def test_deep_cases_are_not_timed() -> None:
    case = dataclasses.replace(cases("smoke", ["mlp-400"])[0], options=("untimed",))
    rows = list(run_case(case, Options(("plain", "checkpoint"), repeats=1, warmup=0), quiet))
    assert [(row.median, row.memory_ratio) for row in rows] == [(None, rows[0].peak / rows[1].peak), (None, 1.0)]  # type: ignore[operator]


def test_nothing_new_is_begun_out_of_time() -> None:
    rows = list(run_case(cases("smoke", ["L24"])[0], Options(("plain",), until=0.0), quiet))
    assert [(row.status, row.note) for row in rows] == [("not run", "out of time")]


def test_wrong_names_are_answered_with_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"no case is called 'L25'. There are: transformer-L24"):
        cases("smoke", ["L25"])
    with pytest.raises(ValueError, match=r"no method is called 'chekpoint'. There are: plain, checkpoint"):
        method("chekpoint")
    with pytest.raises(ValueError, match=r"ours has no option 'state'. There are: memory, form, fixed_point"):
        method("ours[state=16]")
    with pytest.raises(ValueError, match="form must be one of block, branch, relu; got 'tanh'"):
        method("ours[form=tanh]")
    with pytest.raises(ValueError, match="a method is a name"):
        method("ours[memory]")
    with pytest.raises(ValueError, match="plain has one option, step=graph"):
        method("plain[form=relu]")
    with pytest.raises(ValueError, match="size must be one of smoke, cpu, full; got 'huge'"):
        cases("huge")


@pytest.mark.parametrize(
    "written",
    [
        "ours[memory=reverse]",
        "ours[memory=0.6*checkpoint,form=branch,fixed_point=int16,verify=off]",
        "checkpoint[step=graph]",
    ],
)
def test_a_method_is_called_what_is_written(written: str) -> None:
    assert method(written).name == written


def test_a_description_means_the_network() -> None:
    _, setup, _ = prepared("resnet152-64-bf16")
    found = method("ours[memory=checkpoint,form=relu,fixed_point=int16,verify=off,gamma=0.5]").build(setup)
    nets = [part for part in found.modules() if isinstance(part, rg.MomentumNet)]
    assert len(nets) == len(setup.network.stages)
    for net in nets:
        assert (net.memory, net.form, net.verify, float(net.gamma)) == ("checkpoint", "relu", "off", 0.5)
    assert described(parsed("ours[form=relu,memory=auto]")[1]) == Ours(form="relu")
    assert method("ours[memory=0.5*plain]").share == (0.5, "plain")


def test_a_budget_is_a_share_of_what_was_measured() -> None:
    case = cases("smoke", ["resnet1202-128"])[0]
    names = ("checkpoint", "ours[memory=1.5*checkpoint,by=convert]")
    rows = {row.method: row for row in run_case(case, Options(names, repeats=1, warmup=0), quiet)}
    ours = rows[names[1]]
    assert ours.status == "ok", ours.note
    assert ours.budget == int(1.5 * rows["checkpoint"].peak)  # type: ignore[operator]
    assert ours.peak <= ours.budget  # type: ignore[operator]
    alone = next(run_case(case, Options(names[1:], repeats=1, warmup=0), quiet))
    assert (alone.status, "add the method 'checkpoint'" in alone.note) == ("raised", True)


def test_methods_that_are_not_for_a_case_are_left_out() -> None:
    tokens, images = cases("smoke", ["L24"])[0], cases("smoke", ["resnet152-64-fp32"])[0]
    written = ["plain", "ours[form=branch]", "ours[form=relu]", "ours[fixed_point=int16]"]
    assert [m.name for m in choose(tokens, written)] == [
        "plain",
        "ours[memory=auto,form=branch]",
        "ours[memory=auto,fixed_point=int16]",
    ]
    assert [m.name for m in choose(images, written)] == ["plain", "ours[memory=auto,form=relu]"]
    assert not any("compile" in m.name for m in choose(tokens, (), ["compile"]))
    assert set(MODES) <= set(standard(images))


def test_full_cases_are_those_asked_for() -> None:
    """Shapes and depths only: nothing of this size is built here."""
    full = {case.name: case for case in cases("full")}
    assert {"resnet152-64-fp32", "resnet152-64-bf16", "resnet152-320-fp32", "resnet152-320-bf16"} < set(full)
    assert full["transformer-L24-bf16"].shape == (512, 1024)
    assert full["transformer-L24-bf16"].batch == 64
    assert full["transformer-16k-bf16"].shape == (16384, 1024)
    with torch.device("meta"):
        deep, thin = full["transformer-L96-fp32"].network(), full["resnet1202-128-fp32"].network()
        images = full["resnet152-320-bf16"].network()
    assert deep.activations == 96 * 512 * 1024
    assert thin.activations == 200 * 16 * 32**2 + 199 * 32 * 16**2 + 199 * 64 * 8**2
    assert images.activations == sum(k * 256 * 2**i * (56 >> i) ** 2 for i, k in enumerate((2, 7, 35, 2)))


def test_rows_survive_the_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = Row(case="a", title="A, 1", method="plain", median=1.25, peak=3, note='says "no", twice')
    record.append(path, [first])
    record.append(path, [Row(case="a", method="memcnn", status="not run"), dataclasses.replace(first, median=2.5)])
    assert record.read(path) == [
        first,
        Row(case="a", method="memcnn", status="not run"),
        dataclasses.replace(first, median=2.5),
    ]
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    for wrong in (record.read, lambda path: record.append(path, [first])):
        with pytest.raises(ValueError, match="is no table of this benchmark"):
            wrong(tmp_path / "other.csv")
