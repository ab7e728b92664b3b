"""The runner, on the small twins of its cases: what it measures, what it records when a method fails, what it checks."""

import dataclasses
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
import retrograde_bench.methods as methods_module
from retrograde_bench import commands, record
from retrograde_bench.cases import Case, cases
from retrograde_bench.methods import Method, Setup, choose, methods
from retrograde_bench.record import Row
from retrograde_bench.runner import Options, run_case
from retrograde_bench.step import Agreement, largest_batch, peak, training_step, zero_gradients


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """Every measurement of memory collects garbage first: it need not look through all that PyTorch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


EAGER = (
    "plain",
    "checkpoint",
    "checkpoint-sqrt",
    "selective",
    "ours-reverse",
    "ours-checkpoint",
    "ours-store",
    "ours-auto",
)


def quiet(text: str) -> None:
    pass


def prepared(name: str) -> tuple[Case, Setup, Tensor]:
    case = cases("smoke", [name])[0]
    setup = Setup(case, case.network(), 0.9, "aot_eager_decomp_partition")
    x = case.inputs(case.batch, "cpu")
    zero_gradients(setup, x)
    return case, setup, x


def method(name: str) -> Method:
    return next(m for m in methods() if m.name == name)


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
        ("resnet152-64-fp32", ("plain", "checkpoint", "ours-auto", "ours-relu-reverse", "ours-relu-auto")),
        ("resnet1202-128-fp32", ("plain", "checkpoint", "ours-reverse")),
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
        peaks.append(peak(step, torch.device("cpu")))
    assert peaks[0] < 0.9 * peaks[1]


def failing(error: Exception) -> Method:
    def build(setup: Setup) -> nn.Module:
        raise error

    return Method("failing", "", build)


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("no memory"), "out of memory"), (KeyError("broken"), "raised")],
)
def test_a_failure_is_a_row(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [failing(error), method("plain")]
    monkeypatch.setattr(methods_module, "methods", lambda: kept)
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

    monkeypatch.setattr(methods_module, "methods", lambda: [Method("weak", "", lambda setup: Weak()), method("plain")])
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
    assert not any(m.graphed for m in choose(case, ["*"]))
    rows = list(run_case(case, Options(("graph-plain",), repeats=1, warmup=0), quiet))
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
    m = method("ours-reverse")
    with pytest.MonkeyPatch.context() as patch:  # by default the network itself would raise
        patch.setattr(rg, "MomentumNet", partial(rg.MomentumNet, verify="off"))
        assert Agreement(x).check(m, setup, m.build(setup)).startswith("differs in")
    assert case.name == setup.case.name


def test_a_twin_that_does_not_fit_is_stood_in_for() -> None:
    _, setup, x = prepared("transformer-L96-fp32")
    m = method("ours-reverse")
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
        return held + peak(step, torch.device("cpu"))

    best = largest_batch(m, setup, limit)
    assert total(best) <= limit < total(best + max(2, best // 10))


def test_a_run_is_written_as_it_goes_and_reported_from_its_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--cases", "16k", "L96-fp32", "--methods", "plain", "checkpoint", "ours-reverse"]
    arguments = ["run", "--size", "smoke", *chosen, "--repeats", "1"]
    commands.main([*arguments, "--device", "cpu", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "ours-reverse" in told
    rows = record.read([tmp_path / "step.csv"])
    assert len(rows) == 6
    assert str(tmp_path) not in (tmp_path / "step.md").read_text()
    commands.main(["report", str(tmp_path / "step.csv"), "--out", str(tmp_path / "kept"), "--name", "step_here"])
    assert record.read([tmp_path / "kept" / "step_here.csv"]) == sorted(rows, key=lambda r: "16k" in r.case)
    text = (tmp_path / "kept" / "step_here.md").read_text()
    for needed in ("hardware:", "versions: torch", "command: `python benchmarks/step.py", "| ours-reverse |", "equal"):
        assert needed in text
    assert (tmp_path / "kept" / "step_here.png").stat().st_size > 10_000


def test_nothing_new_is_begun_out_of_time() -> None:
    rows = list(run_case(cases("smoke", ["L24"])[0], Options(("plain",), until=0.0), quiet))
    assert [(row.status, row.note) for row in rows] == [("not run", "out of time")]


def test_wrong_names_are_answered_with_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"no case is called 'L25'. There are: transformer-L24"):
        cases("smoke", ["L25"])
    with pytest.raises(ValueError, match=r"no method is called 'chekpoint'. There are: plain, checkpoint"):
        choose(cases("smoke", ["L24"])[0], ["chekpoint"])
    with pytest.raises(ValueError, match="size must be one of smoke, full; got 'huge'"):
        cases("huge")


def test_names_choose_exactly_patterns_widely() -> None:
    case = cases("smoke", ["L24"])[0]
    assert [m.name for m in choose(case, ["checkpoint"])] == ["checkpoint"]
    assert len(choose(case, ["ours-budget-*"])) == len(methods_module.SWEEP)
    assert not any("compile" in m.name for m in choose(case, ["*"], ["*compile*"]))


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


def test_rows_survive_the_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = Row("a", "A, 1", "plain", "ok", median=1.25, peak=3, note='says "no", twice')
    record.append(path, first)
    record.append(path, Row("a", "A, 1", "memcnn", "not run"))
    record.append(path, dataclasses.replace(first, median=2.5))
    assert record.read([path]) == [dataclasses.replace(first, median=2.5), Row("a", "A, 1", "memcnn", "not run")]
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="does not hold results of this benchmark"):
        record.read([tmp_path / "other.csv"])
