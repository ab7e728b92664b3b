"""`retrograde plan MODEL`: what would be converted, the memory of a step each way, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_leaves

from ..convert.plan import Plan, plan
from ..memory.fake import fake_copy, run_step
from ..memory.step import as_call, mean_of_squares
from ..memory.units import human, parse_bytes
from .models import Source, source

AMP = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {"none": 0, "sgd": 1, "adam": 2}  # tensors of the size of the parameters


@dataclass(frozen=True)
class Line:
    """Memory that grows with the batch: peak = fixed + each · batch."""

    fixed: float
    each: float

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> Line:
        each = (large[1] - small[1]) / (large[0] - small[0])
        return cls(small[1] - each * small[0], each)

    def largest(self, budget: float) -> int:
        return max(0, int((budget - self.fixed) // self.each)) if self.each > 0 else 0


def main(
    name: str, batch: int, size: int | None, gamma: float, budget: str, amp: str, optimizer: str, stages: list[str]
) -> None:
    """Plan, and show it."""
    console = Console()
    available = parse_bytes(budget) if budget else None
    chosen = source(name)
    # a second batch, for how memory grows with it
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
    if available is not None:
        made = plans[batch]
        room = available - made.parameters - (1 + OPTIMIZERS[optimizer]) * made.gradients - made.batch
        make = partial(plan, model, examples[batch], memory=max(room, 0), **options)  # type: ignore[arg-type]
        with console.status(f"the quickest way within {human(available)}"):
            told = _within(room, make, gamma, stages)
        console.print(told, soft_wrap=True, highlight=False)


def _planned(name: str, model: nn.Module, example: Any, options: dict[str, Any]) -> Plan:
    """The plan; where the model itself fails on such a batch (a size it was not made for), an error that says so."""
    try:
        return plan(model, example, **options)
    except (ValueError, TypeError):
        raise  # in words already
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


def built(chosen: Source) -> tuple[nn.Module, FakeTensorMode]:
    """The model without values, or with them where its own code looks at them."""
    mode = FakeTensorMode()
    try:
        with mode, _uninitialised():
            return chosen.build().train(), mode
    except DataDependentOutputException:
        return chosen.build().train(), mode


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Initial weights are not drawn: there are no values to draw."""
    kept = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")}
    for name in kept:
        setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(nn.init, name, function)


def _stages(made: Plan) -> Table:
    table = Table(title=str(made).splitlines()[0], box=box.SIMPLE_HEAD, title_justify="left")
    for k, heading in enumerate(made.table()[0]):
        table.add_column(heading, justify="right" if k in (1, 3, 4) else "left", overflow="fold")
    for row, cells in zip(made.rows, made.table()[1:], strict=True):
        table.add_row(*cells, style="" if row.form else "dim")
    return table


def _within(room: int, make: Callable[[], Plan], gamma: float, stages: list[str]) -> str:
    """What `convert` would do with what is left for activations."""
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


def _memory(plans: dict[int, Plan], small: int, batch: int, optimizer: str, available: int | None) -> Table:
    made, fewer = plans[batch], plans[small]
    constant = made.parameters + made.gradients + OPTIMIZERS[optimizer] * made.gradients
    besides = f"parameters {human(made.parameters)}, gradients {human(made.gradients)}"
    besides += f", {optimizer} {human(OPTIMIZERS[optimizer] * made.gradients)}" if OPTIMIZERS[optimizer] else ""
    table = Table(
        title=f"One training step at batch {batch}, predicted", caption=f"in all: with {besides} and the batch, {human(made.batch)}",
        box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
    )  # fmt: skip
    for heading in (
        "",
        "activations, peak",
        "held for backward",
        "of plain",
        "in all",
        *(["largest batch"] if available is not None else []),
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for way, peak in made.peaks.items():
        cells = [way, human(peak.peak), human(peak.held), f"{peak.peak / made.peaks['plain'].peak:.2f}×"]
        cells.append(human(constant + made.batch + peak.peak))
        if available is not None:
            totals = [(n, constant + p.batch + p.peaks[way].peak) for n, p in ((small, fewer), (batch, made))]
            line = Line.through(*totals) if small != batch else Line(constant, totals[1][1] - constant)
            cells.append(str(line.largest(available)))
        table.add_row(*cells)
    return table
