"""Times that can be compared: several functions, taken in turns in one process.

A machine's speed drifts (clocks, neighbours, caches). Functions timed one after the other each meet another machine. Taken in
turns they all meet the same one, and the ratio of their medians stays. Every other round runs in the opposite order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .units import duration


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat, in the order they were taken.

    >>> Times((1.0, 2.0, 3.0, 4.0, 5.0)).quartiles
    (2.0, 4.0)
    >>> Times((3.0, 3.0, 9.0)).ratio(Times((2.0, 2.0, 2.0)))
    1.5
    """

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("there are no times to summarise: repeats must be at least 1.")

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    def ratio(self, baseline: Times) -> float:
        """How many times as long as the baseline, by the medians."""
        return self.median / baseline.median

    def __str__(self) -> str:
        lower, upper = self.quartiles
        return f"{duration(self.median)} (quartiles {duration(lower)} to {duration(upper)}, best {duration(self.min)})"


def interleave(
    fns: Mapping[str, Callable[[], Any]], repeats: int = 10, warmup: int = 2, *, device: torch.device | str = "cpu"
) -> dict[str, Times]:
    """Time several functions in turns.

    Args:
        fns: what to time, by name. Every round runs each function once.
        repeats: rounds that count; `warmup`: rounds before them that do not.
        device: a CUDA device is waited for before each reading of the clock.

    >>> times = interleave({"short": lambda: sum(range(10)), "long": lambda: sum(range(100_000))}, repeats=5)
    >>> times["long"].ratio(times["short"]) > 1
    True
    """
    if not fns or repeats < 1 or warmup < 0:
        raise ValueError(
            f"nothing to time: got {len(fns)} functions, repeats={repeats}, warmup={warmup}; "
            "give at least one function, repeats >= 1 and warmup >= 0."
        )
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda _: None
    seconds: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(warmup + repeats):
        for name in list(fns) if turn % 2 == 0 else list(fns)[::-1]:
            wait(device)
            start = time.perf_counter()
            fns[name]()
            wait(device)
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: Times(tuple(taken)) for name, taken in seconds.items()}
