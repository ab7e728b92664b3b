"""docs/benchmark.md says what the code computes and the results hold."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import retrograde as rg
from retrograde_bench import bits, page, record
from retrograde_bench.methods import methods
from retrograde_bench.record import Row
from retrograde_bench.show import aligned, lines


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> Iterator[None]:
    """Every measurement of memory collects garbage first: it need not look through all that PyTorch has imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_page_is_up_to_date() -> None:
    assert page.update() == page.PAGE.read_text(encoding="utf-8"), "python benchmarks/step.py page"


def test_results_come_from_the_newest_file(tmp_path: Path) -> None:
    row = Row("L", "L96", "checkpoint", "ok", median=100.0, peak=10**9, date="2026-01-01")
    record.write(tmp_path / "step_old.csv", [row])
    ours = Row("L", "L96", "ours-reverse", "ok", median=150.0, peak=25 * 10**7, gradients="equal", date="2026-02-01")
    record.write(tmp_path / "step_new.csv", [row, ours])
    text = page.sections(page.newest(tmp_path))["results"]
    assert "step_new.csv" in text
    assert "| ours-reverse | 150.0 | ––– | 1.500 | 250.0 MB | 0.250 |" in text


def test_every_method_is_explained() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for method in methods():
        assert f"| `{method.name}` | {method.about} |" in text


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'bits'"):
        page.filled("nothing here", {"bits": "1"})


@pytest.mark.parametrize(("gamma", "depth"), [(0.9, 16), (0.9, 61), (0.9, 166), (0.5, 24), (0.99, 600)])
def test_held_bytes_are_those_of_the_state_and_near_the_ideal(gamma: float, depth: int) -> None:
    held, ideal = bits.held_bytes(gamma, depth), bits.ideal_bytes(gamma, depth)
    ratio = rg.MomentumNet([nn.Identity()], gamma=gamma).gamma
    buffers = math.ceil(depth * math.log2(1 / gamma) / 25)
    waste = buffers * (math.log2(ratio.numerator * ratio.denominator) + 24) / 8
    assert ideal <= held <= ideal + waste


def test_columns_are_aligned_and_messages_stand_across() -> None:
    rows = [
        Row(
            "c", "C", "checkpoint", "ok", median=10.0, lower=9.0, upper=11.0, peak=2000, uncached=2000, activations=100
        ),
        Row("c", "C", "ours-auto", "ok", median=9.0, lower=8.0, upper=10.0, peak=500, uncached=500, activations=100),
        Row("c", "C", "memcnn", "raised", note="TypeError: something long that must not widen a column of figures"),
        Row("c", "C", "ours-budget-50", "ok", median=9.5, lower=9.0, upper=10.0, peak=900, budget=800, activations=100),
    ]
    text = aligned("C", rows).splitlines()
    assert text[2].index("10.0") == text[3].index(" 9.0")
    assert text[4].endswith("of figures")
    assert lines(rows)[1][3:6] == ["0.900", "500 B", "0.250"]
    assert lines(rows)[1][8] == "5.00"
    assert "OVER" in lines(rows)[3][0]
