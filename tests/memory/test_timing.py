"""Times are taken in turns, and summed up rightly."""

import time

import pytest

from retrograde.memory import Times, interleave


def test_functions_take_turns_and_every_other_round_runs_backward() -> None:
    calls: list[str] = []
    interleave({name: (lambda name=name: calls.append(name)) for name in "abc"}, repeats=2, warmup=1)
    assert "".join(calls) == "abc" + "cba" + "abc"


def test_warmup_is_run_and_not_counted() -> None:
    waits = iter([0.5, 0.5, 0.0, 0.0, 0.0])
    times = interleave({"f": lambda: time.sleep(next(waits))}, repeats=3, warmup=2)["f"]
    assert len(times.seconds) == 3
    assert max(times.seconds) < 0.5


def test_a_longer_function_takes_longer() -> None:
    times = interleave({"a": lambda: time.sleep(0.002), "b": lambda: time.sleep(0.008)}, repeats=5, warmup=0)
    assert times["b"].ratio(times["a"]) > 1.5
    assert times["a"].min >= 0.002


def test_summary() -> None:
    times = Times((4.0, 1.0, 3.0, 2.0, 100.0))
    assert (times.median, times.min, times.quartiles) == (3.0, 1.0, (2.0, 4.0))
    assert Times((0.5,)).quartiles == (0.5, 0.5)
    assert str(Times((0.010, 0.012, 0.014))) == "12.0 ms (quartiles 11.0 ms to 13.0 ms, best 10.0 ms)"


@pytest.mark.parametrize(
    ("fns", "repeats", "warmup"), [({}, 1, 0), ({"f": lambda: None}, 0, 0), ({"f": lambda: None}, 1, -1)]
)
def test_nothing_to_time_is_refused(fns: dict, repeats: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="give at least one function, repeats >= 1 and warmup >= 0"):
        interleave(fns, repeats, warmup)


def test_no_times_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        Times(())
