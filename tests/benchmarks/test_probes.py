"""The scripts whose tables stand in docs/log.md, at sizes of seconds."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"elements": 500, "depth": 2, "width": 16, "heads": 2, "tokens": 4, "batch": 2}
SMALL = ["--device=cpu", *(f"--{name}={size}" for name, size in SIZES.items())]


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_narrow_state_costs_digits(capsys: pytest.CaptureFixture[str]) -> None:
    narrow = script("narrow")
    narrow["main"](["--depth", "6", "--channels", "16", "--batch", "4", "--side", "6"])
    table = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    errors = {name.strip(): [float(cell) for cell in cells] for name, *cells in table}
    assert len(errors) == 5
    plain, wide, full, roomy, tight = (row[0] for row in errors.values())
    assert 0 < wide <= full < tight < roomy
    assert full < plain


def test_errors_are_relative_and_the_median_is_of_the_parameters() -> None:
    one = torch.ones(4)
    row = script("narrow")["compared"]("it", [1.5 * one, 3 * one, 1.1 * one, 1.2 * one, 1.9 * one], [one] * 5)
    assert (row.output, row.input, row.parameters, row.worst) == pytest.approx((0.5, 2.0, 0.2, 0.9))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_the_probe_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("gpu_probe")["main"]([]) == 1
    said = capsys.readouterr()
    assert "no GPU" in said.err
    assert not said.out


def test_the_probe_measures_every_step_and_compares_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("gpu_probe")["main"](SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("TB/s" in line for line in lines) == 1 + 4 * 6 + 4
    compared = [line for line in lines if line.startswith("deterministic=")]
    assert len(compared) == 20
    equal = "plain/plain 0, store/store 0, reverse/store 0 of 25"
    assert all(line.endswith(equal) for line in compared if "math" in line or "default" in line)


def test_the_probe_counts_what_differs() -> None:
    differing = script("gpu_probe")["differing"]
    a, b = torch.zeros(3), torch.tensor([0.0, 0.0, 1e-7])
    assert differing([a, a, b], [a, b, b]) == 1


def test_the_probe_leaves_settings_as_they_were() -> None:
    probe = script("gpu_probe")
    stack = probe["Stack"].drawn(1, 16, 2, 4, 2, "cpu")
    probe["attention"](stack, True, False, "cudnn")
    assert not torch.are_deterministic_algorithms_enabled()


def test_kernel_times_name_what_ran_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--size=smoke",
        "--device=cpu",
        "--cases",
        "L96-fp32",
        "--methods",
        "checkpoint",
        "ours-branch-reverse",
        "--top",
        "400",
    ]
    assert script("kernel_times")["main"](small) == 0
    checkpoint, ours = capsys.readouterr().out.strip().split("\n\n")
    assert "checkpoint" in checkpoint.splitlines()[0]
    assert "ours-branch-reverse" in ours.splitlines()[0]
    times = {line.split(" ×  ")[1]: line.split() for line in ours.splitlines()[1:]}
    assert int(times["aten::addmm"][2]) == 64  # of 8 layers, forward and again, 4 products each
    assert float(times["aten::addmm"][0]) > 0
    assert all(float(ms) >= 0 for ms, *_ in times.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_kernel_times_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("kernel_times")["main"]([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_the_cost_of_a_block_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    cost = script("block_cost")
    cost["main"](["--blocks", "4", "--width", "4", "--repeats", "1"])
    title, *rows = capsys.readouterr().out.splitlines()
    assert title.split()[-2:] == ["median", "least"]
    names = {line[:32].strip() for line in rows}
    assert names == set(cost["steps"](2, 4))
    assert all(0 < float(least) <= float(median) for *_, median, least in map(str.split, rows))


def test_what_is_alive_at_the_peak_is_named_by_who_asked() -> None:
    peak = script("at_peak")

    def frame(filename: str, line: int, name: str) -> dict[str, object]:
        return {"filename": filename, "line": line, "name": name}

    conv, step = (
        frame("/x/torch/nn/modules/conv.py", 5, "_conv"),
        frame("/x/retrograde/stack/momentum.py", 7, "advance"),
    )
    assert peak["asked_by"]([conv]) == "conv.py:5 _conv"
    assert peak["asked_by"]([conv, step]) == "momentum.py:7 advance … conv.py:5 _conv"
    assert (
        peak["asked_by"]([frame("Conv_v8.cpp", 0, "run_conv_plan(cudnnContext)"), step])
        == "run_conv_plan(cudnnContext)"
    )
    assert peak["asked_by"]([]) == "?"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_there_is_no_history_of_allocations(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("at_peak")["main"]([]) == 1
    assert "no CUDA device" in capsys.readouterr().err
