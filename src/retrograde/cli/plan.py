"""`retrograde plan MODEL`: what would be converted, the memory of a step each way, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

from ..convert.plan import Plan, plan
from ..memory.fake import fake_copy, run_step
from ..memory.step import as_call, mean_of_squares
from ..memory.units import human, parse_bytes
from ..nets.checks import choice
from .models import built, source

AMP = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"none": 0, "sgd": 1, "adam": 2}  # tensors of the size of the parameters


def main(
    name: str, batch: int, size: int | None, gamma: float, budget: str, amp: str, optimizer: str, stages: list[str]
) -> None:
    """Plan, and show it."""
    choice("--amp", amp, tuple(AMP))
    choice("--optimizer", optimizer, tuple(OPTIMIZERS))
    console = Console()
    available = parse_bytes(budget) if budget else None
    chosen = source(name)
    # A second batch shows how memory grows with the batch.
    small = batch if available is None else batch // 2 if batch > 3 else 2 * batch
    with console.status(f"building {chosen.name} without values"):
        model, mode = built(chosen)
    with mode:
        examples = {n: chosen.example(model, n, size) for n in {small, batch}}
    options = {"gamma": gamma, "stages": stages or None, "autocast": AMP[amp]}
    plans: dict[int, Plan] = {}
    for n, example in examples.items():
        with console.status(f"a training step of {chosen.name} at batch {n}, four ways"):
            plans[n] = _planned(chosen.name, model, example, options)
    console.print(_stages(plans[batch]))
    console.print(_memory(plans, small, batch, optimizer, available))
    console.print(_gammas(plans[batch]))
    if available is not None:
        room = available - _constant(plans[batch], optimizer) - plans[batch].batch
        make = partial(plan, model, examples[batch], memory=max(room, 0), **options)  # type: ignore[arg-type]
        with console.status(f"the quickest way within {human(available)}"):
            told = _within(room, make, gamma, stages)
        console.print(told, soft_wrap=True, highlight=False)


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


def _stages(made: Plan) -> Table:
    headings, *rows = made.table()
    table = Table(title=str(made).splitlines()[0], box=box.SIMPLE_HEAD, title_justify="left")
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k in (1, 3, 4) else "left", overflow="fold")
    for row, cells in zip(made.rows, rows, strict=True):
        table.add_row(*cells, style="" if row.form else "dim")
    return table


def _gammas(made: Plan) -> Table:
    headings, *rows = made.by_gamma()
    table = Table(title="In reverse, by γ", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _within(room: int, make: Callable[[], Plan], gamma: float, stages: list[str]) -> str:
    """What `convert` would do with the memory that is left for activations."""
    if room <= 0:
        return "Nothing is left for activations at this batch."
    try:
        made = make()
    except ValueError as error:
        return str(error)
    modes = "; ".join(f"{row.path}: {row.mode}" for row in made.rows)
    peak = made.peaks["auto"].peak
    named = f", stages={stages}" if stages else ""
    return f"rg.convert(model, gamma={gamma:g}{named}, memory={room}), activations at most {human(peak)}:\n  {modes}"


def _constant(made: Plan, optimizer: str) -> int:
    """The memory of parameters, gradients and the optimizer's state."""
    return made.parameters + (1 + OPTIMIZERS[optimizer]) * made.gradients


def _memory(plans: dict[int, Plan], small: int, batch: int, optimizer: str, available: int | None) -> Table:
    made = plans[batch]
    besides = f"parameters {human(made.parameters)}, gradients {human(made.gradients)}"
    if OPTIMIZERS[optimizer]:
        besides += f", {optimizer} {human(OPTIMIZERS[optimizer] * made.gradients)}"
    table = Table(
        title=f"One training step at batch {batch}, predicted", caption=f"in all: with {besides} and the batch, {human(made.batch)}",
        box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
    )  # fmt: skip
    table.add_column("")
    for heading in ("activations, peak", "held for backward", "of plain", "in all"):
        table.add_column(heading, justify="right")
    if available is not None:
        table.add_column("largest batch", justify="right")
    for way, peak in made.peaks.items():
        totals = {n: _constant(p, optimizer) + p.batch + p.peaks[way].peak for n, p in plans.items()}
        cells = [
            human(peak.peak),
            human(peak.held),
            f"{peak.peak / made.peaks['plain'].peak:.2f}×",
            human(totals[batch]),
        ]
        if available is not None:
            cells.append(str(largest_batch((small, totals[small]), (batch, totals[batch]), available)))
        table.add_row(way, *cells)
    return table


def largest_batch(one: tuple[int, int], other: tuple[int, int], available: int) -> int:
    """The largest batch that fits, for memory that grows linearly with it, from two pairs (batch, memory).

    >>> largest_batch((16, 2600), (32, 4200), available=5000)
    40
    """
    each = (other[1] - one[1]) / (other[0] - one[0])
    fixed = one[1] - each * one[0]
    return max(0, int((available - fixed) // each)) if each > 0 else 0
