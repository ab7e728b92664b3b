"""The looks inside a step and the tables of accuracy, at sizes of seconds."""

import pytest
import torch
from typer.testing import CliRunner

from command_line import app
from retrograde_bench.accuracy import compared, fixed_point, narrow
from retrograde_bench.inside import asked_by


def test_narrow_state_costs_digits() -> None:
    plain, wide, full, tight = (row.output for row in narrow(depth=6, channels=16, batch=4, side=6))
    assert 0 < wide <= full < tight
    assert full < plain


def test_guard_digits_are_worth_what_float32_does() -> None:
    rows = {row.name.split(", ", 1)[1]: row for row in fixed_point(depth=60, width=16, batch=8) if "0.99" in row.name}
    floats, bare, calibrated = rows["float32 recurrence"], rows["24 bits, no guard digits"], rows["as it comes"]
    assert calibrated.worst < 5 * floats.worst
    assert bare.worst > 5 * calibrated.worst


def test_errors_are_relative_and_the_median_is_of_the_parameters() -> None:
    one = torch.ones(4)
    row = compared("it", [1.5 * one, 3 * one, 1.1 * one, 1.2 * one, 1.9 * one], [one] * 5)
    assert (row.output, row.input, row.parameters, row.worst) == pytest.approx((0.5, 2.0, 0.2, 0.9))


def looked(*arguments: str) -> str:
    shown = CliRunner().invoke(app, ["bench", "inside", *arguments, "--size", "smoke", "--device", "cpu"])
    return shown.output if shown.exit_code == 0 else str(shown.exception)


def test_kernel_times_name_what_ran_and_how_long() -> None:
    methods = "checkpoint,ours[memory=reverse,form=branch]"
    told = looked("kernels", "--cases", "L96-fp32", "--methods", methods, "--top", "400")
    checkpoint, ours = told.strip().split("\n\n")
    assert "checkpoint" in checkpoint.splitlines()[0]
    assert "ours[memory=reverse,form=branch]" in ours.splitlines()[0]
    times = {line.split(" ×  ")[1]: line.split() for line in ours.splitlines()[1:]}
    assert int(times["aten::addmm"][2]) == 64  # of 8 layers, forward and again, 4 products each
    assert float(times["aten::addmm"][0]) > 0
    assert all(float(ms) >= 0 for ms, *_ in times.values())


def test_the_host_has_a_row_for_every_method() -> None:
    methods = ["plain", "checkpoint", "ours[memory=auto,form=relu]"]
    _, *rows = looked(
        "host", "--cases", "resnet152-64-fp32", "--methods", ",".join(methods), "--repeats", "1"
    ).splitlines()
    assert [line.split()[0] for line in rows] == methods
    for _, forward, backward, wait, whole in map(str.split, rows):
        assert float(forward) + float(backward) + float(wait) == pytest.approx(float(whole), abs=0.05)


def test_what_cannot_be_looked_at_is_refused() -> None:
    assert "only the allocator of a CUDA device keeps a history" in looked("allocations")
    assert "must be one of allocations, kernels, host; got 'kernel'" in looked("kernel")


def test_what_is_alive_at_the_peak_is_named_by_who_asked() -> None:
    def frame(filename: str, line: int, name: str) -> dict[str, object]:
        return {"filename": filename, "line": line, "name": name}

    conv = frame("/x/torch/nn/modules/conv.py", 5, "_conv")
    step = frame("/x/retrograde/reverse/momentum.py", 7, "advance")
    library = frame("Conv_v8.cpp", 0, "run_conv_plan(cudnnContext)")
    assert asked_by([conv]) == "conv.py:5 _conv"
    assert asked_by([conv, step]) == "momentum.py:7 advance … conv.py:5 _conv"
    assert asked_by([library, step]) == "run_conv_plan(cudnnContext)"
    assert asked_by([]) == "?"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_predicted_memory_is_compared_on_a_gpu_only() -> None:
    assert "no CUDA device" in str(CliRunner().invoke(app, ["bench", "predict"]).exception)
