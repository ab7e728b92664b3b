"""`retrograde plan MODEL`: what to do, what would be converted, the memory of a step each way, and what fits."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils._pytree import tree_leaves

from ..convert.plan import WIDTH, Plan, plan
from ..memory.fake import fake_copy, run_step
from ..memory.step import as_call, mean_of_squares
from ..memory.units import human, parse_bytes
from ..nets.checks import choice
from .models import adapted, built, source

AMP = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}
EIGHT_BITS = 1 + 4 / 256
"""Bytes of a number in an 8-bit optimizer: blocks of 256 share a float32."""
OPTIMIZERS: dict[str, float] = {
    "none": 0, "sgd": 4, "lion": 4, "adam": 8, "adamw": 8, "lion8bit": EIGHT_BITS,
    "adam8bit": 2 * EIGHT_BITS, "adamw8bit": 2 * EIGHT_BITS,
}  # fmt: skip
"""Bytes of state per trained float32 parameter. "sgd" is with momentum."""


def main(
    name: str, batch: int, size: int | None, gamma: float, budget: str, amp: str, optimizer: str, lora_rank: int, stages: list[str],
    split: bool = False,
) -> None:  # fmt: skip
    """Plan, and show it."""
    choice("--amp", amp, tuple(AMP))
    choice("--optimizer", optimizer, tuple(OPTIMIZERS))
    available = parse_bytes(budget) if budget else None
    chosen = source(name)
    console = Console(stderr=True)
    with console.status(f"building {chosen.name} without values"):
        model, mode = built(chosen)
        if lora_rank:
            with mode:
                adapted(model, lora_rank)
    state = sum(_state(p, optimizer) for p in model.parameters() if p.requires_grad)
    options: dict[str, Any] = {"gamma": gamma, "stages": stages or None, "autocast": AMP[amp], "split": split}
    size = chosen.size(model, size)

    def planned(batch: int, size: int | None, **more: Any) -> Plan:
        with mode:
            example = chosen.example(model, batch, size)
        with console.status(f"a training step of {chosen.name}: batch {batch}" + (f", size {size}" if size else "")):
            return _planned(chosen.name, model, example, options | more)

    def needed(made: Plan) -> dict[str, int]:
        """Bytes in all, by way of running."""
        fixed = made.parameters + made.gradients + state + made.batch
        return {way: fixed + peak.peak for way, peak in made.peaks.items()}

    made = planned(batch, size)
    totals = needed(made)
    columns: dict[str, dict[str, str]] = {"in all": {way: human(n) for way, n in totals.items()}}
    if available is not None:
        made = replace(made, room=available - (totals["plain"] - made.peaks["plain"].peak))
        other = batch // 2 if batch > 3 else 2 * batch  # a second batch shows how memory grows with the batch
        batches = {other: needed(planned(other, size)), batch: totals}
        columns["max batch"] = _largest(batches, available)
        if size is not None and chosen.sizes:
            try:
                sizes = {n: needed(planned(batch, n)) for n in (size // 4, size // 2)} | {size: totals}
                columns[f"max {chosen.sizes}"] = _largest(sizes, available, chosen.most(model))
            except ValueError:  # a model of one size: there is nothing to say
                pass
    header, *rows = made.summary()
    summary = [(*header, *columns), *((*row, *(found[row[0]] for found in columns.values())) for row in rows)]
    counted = f"{made.besides}, {optimizer} {human(state)}" if state else made.besides
    print(made.text(summary, f"in all: {counted.removeprefix('besides ')}"))
    if made.room is not None and made.verdict.startswith("converting"):
        within = planned(batch, size, memory=made.room)
        named = f", stages={stages}" if stages else ""
        modes = "; ".join(f"{row.path}: {row.mode}" for row in within.rows)
        parted = ", split=True" if split else ""
        call = f"rg.convert(model, gamma={gamma:g}{named}{parted}, memory={made.room})"
        told = f"takes {human(within.peaks['auto'].peak)}, about {within.times['auto']:.2f}× the time of plain: {modes}"
        print(f"\n{call}\n{textwrap.fill(told, WIDTH)}")


def _state(parameter: torch.Tensor, optimizer: str) -> int:
    each = OPTIMIZERS[optimizer]
    return int(each * parameter.numel() * (1 if "8bit" in optimizer else parameter.element_size() / 4))


def _planned(name: str, model: nn.Module, example: Any, options: dict[str, Any]) -> Plan:
    """The plan. If the model itself fails on such a batch (a size it was not made for), the error says so."""
    try:
        return plan(model, example, **options)
    except (ValueError, TypeError):
        raise  # these explain themselves
    except Exception as error:
        try:
            with fake_copy(model, *as_call(example)) as fake:
                run_step(fake, mean_of_squares, options["autocast"])
        except Exception as own:
            shapes = ", ".join(str(tuple(t.shape)) for t in tree_leaves(example) if isinstance(t, torch.Tensor))
            raise ValueError(
                f"{name} as it is fails on an input of shape {shapes}: {str(own).splitlines()[0] or type(own).__name__} "
                "Give another --size, or package.module:function that returns the model and an example of its input."
            ) from error
        raise


def _largest(needed: Mapping[int, dict[str, int]], available: int, most: int | None = None) -> dict[str, str]:
    """By way of running, the largest batch or length that fits. Memory at some is given."""
    ways = next(iter(needed.values()))
    found = {way: largest({n: totals[way] for n, totals in needed.items()}, available) for way in ways}
    return {way: "any" if n is None else str(n if most is None else min(n, most)) for way, n in found.items()}


def largest(needed: Mapping[int, int], available: int) -> int | None:
    """The largest n that fits, for memory that is the polynomial through these points (n, memory); None if it does not grow.

    >>> largest({16: 2600, 32: 4200}, available=5000)
    40
    """

    def memory(n: float) -> float:
        return sum(
            m * math.prod((n - other) / (at - other) for other in needed if other != at) for at, m in needed.items()
        )

    most = max(needed)
    if memory(2 * most) <= memory(most):
        return None
    low, high = 0, 1
    while memory(high) <= available:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory(middle) <= available else (low, middle)
    return low
