"""docs/benchmark.md says what the code computes and the results hold."""

import math
from dataclasses import replace

import pytest
from torch import nn

import retrograde as rg
from retrograde_bench import bits, page, record
from retrograde_bench.cases import cases
from retrograde_bench.methods import baselines
from retrograde_bench.record import Row
from retrograde_bench.show import aligned, lines


def test_the_page_is_up_to_date() -> None:
    assert page.update() == page.PAGE.read_text(encoding="utf-8"), "retrograde bench page"


def test_the_page_has_the_last_measurement_of_every_method() -> None:
    base = Row(
        case="transformer-L96-fp32", title="L96", method="checkpoint", median=100.0, peak=10**9, date="2026-01-01"
    )
    ours = replace(base, method="ours[memory=reverse]", median=150.0, peak=25 * 10**7, gradients="equal")
    again = replace(ours, median=140.0, time_ratio=1.4, memory_ratio=0.25, date="2026-02-01", commit="abc1234")
    gone = replace(ours, method="ours[memory=reverse,every=2]", median=77.0)
    text = page.sections([base, ours, gone, replace(again, status="raised"), again])["results"]
    assert "| ours[memory=reverse] | 140.0 | 1.400 | 250.0 MB | 0.250 | equal | abc1234 |" in text
    assert "77.0" not in text  # there is no such method any more
    assert text.index("| checkpoint |") < text.index("| ours[memory=reverse] |")


def test_every_row_of_the_table_that_can_be_measured_again_is_of_a_case_that_there_is() -> None:
    rows = record.read(record.TABLE)
    names = {case.name for case in cases("smoke")}
    assert len(rows) > 300
    assert {row.case for row in rows if not row.predicted} <= names
    assert all(row.command and row.date and row.versions for row in rows)


def test_every_baseline_is_explained() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert len(baselines()) == 12
    for method in baselines():
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
    blank = Row(
        case="c",
        title="C",
        method="checkpoint",
        median=10.0,
        time_ratio=1.0,
        peak=2000,
        memory_ratio=1.0,
        activations=100,
    )
    rows = [
        blank,
        replace(
            blank,
            method="ours[memory=auto]",
            median=9.0,
            time_ratio=0.9,
            peak=500,
            memory_ratio=0.25,
            lower=8.0,
            upper=10.0,
        ),
        Row(method="memcnn", status="raised", note="TypeError: something long that must not widen a column of figures"),
        replace(blank, method="ours[memory=0.5*plain]", peak=900, budget=800),
    ]
    text = aligned("C", rows).splitlines()
    assert text[2].index("10.0") == text[3].index(" 9.0")
    assert text[4].endswith("of figures")
    header, _, ours, _, budget = lines(rows)
    assert header == ["method", "step, ms", "quartiles", "× time", "peak", "× memory", "B / el. / layer"]
    assert ours[2:] == ["8.0 to 10.0", "0.900", "500 B", "0.250", "5.00"]
    assert "OVER" in budget[0]
