"""`plan`: what `convert` would do to a model, and what that would save, before anything is changed.

Memory is predicted for four ways to run the same model: plain, every block checkpointed, every stage in reverse, and as asked
for. Each is a training step on a copy of the model without values (`memory.fake`):

    peak = max over t of (bytes alive at time t)        held = the same between forward and backward

both above parameters, gradients and batch, as `measure` reports them. Nothing is computed and nothing is allocated, so the model
may be larger than the machine. Workspaces of kernels are not seen.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..arithmetic.buffers import buffers
from ..arithmetic.fixed import FixedPoint
from ..memory.budget import Step, choose, observe
from ..memory.fake import Copy, device_of, fake_copy
from ..memory.modes import MemoryPlan, buffer_bytes, parse_memory
from ..memory.peak import Peak
from ..memory.step import as_call, bytes_of
from ..memory.units import human
from ..reverse.recurrence import Recurrence, magnitude
from .convert import GAMMA, check_example, check_model, check_settings, look, place, stages_of, trial
from .find import Finding
from .stage import Settings


@dataclass(frozen=True)
class Row:
    """One stage, or one block that is left out of the stages.

    Attributes:
        path: where it is.
        blocks: how many blocks it has.
        form: "block", "branch", "relu", or "" for a block left out; "block, 24 steps" where layers are split.
        plain: bytes that the plain model keeps of it from forward to backward.
        kept: bytes that the converted model keeps.
        mode: the memory mode, or how many blocks have which: "reverse 12, keep input 23".
        reason: for a block left out, why; where layers are to be split, why some are not.
    """

    path: str
    blocks: int
    form: str
    plain: int
    kept: int
    mode: str
    reason: str = ""


@dataclass(frozen=True)
class GammaRow:
    """What one γ costs with every stage in reverse, and what it changes.

    Attributes:
        gamma: γ.
        bits: information that is kept per element and block, log2(1/γ).
        peak, held: bytes, predicted, as in `Plan.peaks`.
        distance: how far the outputs are from the plain model's, relative to them (`distance`); None if that was not tried.
    """

    gamma: Fraction
    bits: float
    peak: int
    held: int
    distance: float | None


GAMMAS = (Fraction(1, 16), Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), Fraction(9, 10))


@dataclass(frozen=True)
class Plan:
    """What would be converted, and the memory of a training step, predicted.

    Attributes:
        model: the class of the model.
        gamma: γ.
        rows: the stages and the blocks left out.
        peaks: bytes above parameters, gradients and batch, by way of running: "plain", "checkpoint", "reverse" and "auto" (or
            the mode asked for).
        parameters, gradients, batch: their bytes.
        gammas: the same model with every stage in reverse, at some γ.
    """

    model: str
    gamma: Any
    rows: tuple[Row, ...]
    peaks: dict[str, Peak]
    parameters: int
    gradients: int
    batch: int
    gammas: tuple[GammaRow, ...] = ()

    @property
    def stages(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.form)

    @property
    def left(self) -> tuple[Row, ...]:
        """The blocks left out."""
        return tuple(row for row in self.rows if not row.form)

    def table(self) -> list[tuple[str, ...]]:
        """The rows as text, with a header."""
        header = ("stage", "blocks", "form", "plain keeps", "converted keeps", "mode")
        return [header, *(
            (row.path, str(row.blocks), row.form or "left out", human(row.plain), human(row.kept), row.mode + _because(row))
            for row in self.rows
        )]  # fmt: skip

    def summary(self) -> list[tuple[str, ...]]:
        """Peak and held memory by way of running, as text, with a header."""
        plain = self.peaks["plain"].peak
        header = ("memory of a step", "peak", "held for backward", "of plain")
        return [header, *(
            (name, human(peak.peak), human(peak.held), f"{peak.peak / plain:.2f}×") for name, peak in self.peaks.items()
        )]  # fmt: skip

    def by_gamma(self) -> list[tuple[str, ...]]:
        """What each γ costs and changes, as text, with a header."""
        plain = self.peaks["plain"].peak
        header = ("gamma", "bits a block", "peak in reverse", "held for backward", "of plain", "outputs move")
        rows = [
            (spoken(row.gamma), f"{row.bits:.2g}", human(row.peak), human(row.held), f"{row.peak / plain:.2f}×",
             "–" if row.distance is None else f"{100 * row.distance:.2g} %")
            for row in self.gammas
        ]  # fmt: skip
        return (
            [header, *rows]
            if any(row.distance is not None for row in self.gammas)
            else [r[:-1] for r in (header, *rows)]
        )

    def __str__(self) -> str:
        counted = sum(row.blocks for row in self.stages)
        title = f"{self.model}: {counted} blocks in {len(self.stages)} momentum stages, gamma = {self.gamma}"
        fixed = f"besides: parameters {human(self.parameters)}, gradients {human(self.gradients)}, batch {human(self.batch)}"
        tables = (aligned(self.table(), numeric=(1, 3, 4)), aligned(self.summary(), numeric=(1, 2, 3)) + f"\n{fixed}")
        return "\n\n".join((title, *tables, aligned(self.by_gamma(), numeric=(0, 1, 2, 3, 4, 5))))

    def _repr_html_(self) -> str:
        def table(rows: list[tuple[str, ...]]) -> str:
            cells = [[html.escape(cell) for cell in row] for row in rows]
            head = "".join(f"<th>{cell}</th>" for cell in cells[0])
            body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells[1:])
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

        tables = "".join(map(table, (self.table(), self.summary(), self.by_gamma())))
        return f"<p><b>{html.escape(str(self).splitlines()[0])}</b></p>{tables}"


def plan(
    model: nn.Module, example: Any, *, gamma: Any = None, stages: Sequence[str] | str | None = None, form: str | None = None,
    memory: str | int | float = "auto", loss: Callable[[Any], Tensor] | None = None, autocast: torch.dtype | None = None,
    fixed_point: str | FixedPoint = "auto", split: bool = False,
) -> Plan:  # fmt: skip
    """What `convert` with these options would do, and the memory of a training step on this example, predicted.

    Args:
        model: the model, not yet converted. It is neither run nor changed.
        example: a batch, as `measure` takes it. Only shapes and dtypes matter, unless gamma is "auto".
        loss: from the output to a scalar; None for the mean of squares.
        autocast: the dtype of automatic mixed precision, or None.
        gamma, stages, form, memory, fixed_point, split: as in `convert`. gamma="auto" runs a copy of the model on the example, so that
            the plan shows how far its outputs move at each γ.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 256, batch_first=True), 12)
    >>> row = plan(encoder, torch.randn(8, 32, 64)).stages[0]
    >>> row.path, row.blocks, row.mode
    ('layers.0-11', 12, 'reverse')
    """
    mode, budget = parse_memory(memory)
    settings = Settings(
        magnitude(gamma), form or "block", None, mode, fixed_point=fixed_point, insists=form is not None
    )
    check_model(model)
    check_example(example)
    check_settings(settings, model, example)
    args, kwargs = as_call(example)
    with fake_copy(model, args, kwargs) as fake:
        finding = look(fake.model, fake.kwargs or fake.args, stages, form, split)
    tried = trial(model, example, finding, settings, autocast) if isinstance(gamma, str) else None
    if tried is not None:
        settings = replace(settings, gamma=tried.nearest())

    def step(way: Settings, plans: Mapping[str, MemoryPlan] | None = None) -> _Way:
        with fake_copy(model, args, kwargs) as fake:
            place(fake.model, finding, way)
            placed = stages_of(fake.model)
            kept = _watch(fake, finding)
            observed = observe(fake, [stage.stack for stage in placed], plans, loss, autocast, outputs=2)
            momentum = {stage.name: stage.recurrence for stage in placed if not stage.checkpointed}
            return _Way(observed, kept, {stage.name: stage.used for stage in placed}, momentum)

    results = {
        "plain": step(replace(settings, gamma=0, memory="store")),
        "checkpoint": step(replace(settings, gamma=0, memory="checkpoint")),
        "reverse": step(replace(settings, memory="reverse")),
    }
    asked = step(settings)
    if budget is not None:
        asked = step(settings, choose(lambda plans: step(settings, plans).step, asked.step, budget, device_of(model)))
    results[mode] = asked
    order = [path for path, _ in model.named_modules()]
    return Plan(
        type(model).__name__,
        next(g for g in (settings.gamma if tried else gamma, finding.runs[0].gamma, GAMMA) if g is not None),
        _rows(finding, results["plain"].kept, asked, order),
        {way: Peak(result.step.peak, result.step.held) for way, result in results.items()},
        parameters=bytes_of(model.parameters()),
        gradients=bytes_of(p for p in model.parameters() if p.requires_grad),
        batch=bytes_of(tree_leaves(example)),
        gammas=tuple(
            _at(g, results["reverse"], None if tried is None else tried.distance(g))
            for g in sorted({*GAMMAS, *(() if tried is None else (settings.gamma,))})
        ),
    )


@dataclass
class _Way:
    """One way to run the model: the observed step, bytes that each stretch of blocks keeps, modes and recurrences by stage."""

    step: Step
    kept: dict[str, int]
    modes: dict[str, str]
    momentum: dict[str, Recurrence]


def _at(gamma: Fraction, reverse: _Way, distance: float | None) -> GammaRow:
    """The step in reverse at another γ, of which the buffers alone differ."""
    more = 0
    for name, given in reverse.momentum.items():
        other = buffers([gamma] * len(given.gammas))
        more += reverse.step.elements.get(name, 0) * (buffer_bytes(other) - buffer_bytes(given.begins))
    return GammaRow(gamma, math.log2(1 / gamma), reverse.step.peak + more, reverse.step.held + more, distance)


def _watch(fake: Copy, finding: Finding) -> dict[str, int]:
    """Bytes that the forward pass keeps of each run of blocks and of each block that is left out, once it has run."""
    modules = dict(fake.model.named_modules())
    stretches = [(run.name, run.blocks[0], run.blocks[-1]) for run in finding.runs]
    stretches += [(left.path, left.path, left.path) for left in finding.left]
    kept: dict[str, int] = {}

    def note(name: str, sign: int) -> None:
        kept[name] = kept.get(name, 0) + sign * fake.meter.now

    for name, first, last in stretches:
        modules[first].register_forward_pre_hook(lambda *_, name=name: note(name, -1))
        modules[last].register_forward_hook(lambda *_, name=name: note(name, 1))
    return kept


def _rows(finding: Finding, plain: dict[str, int], asked: _Way, order: list[str]) -> tuple[Row, ...]:
    rows = []
    for run in finding.runs:
        rows.append(
            Row(
                run.name,
                len(run.blocks),
                run.form + (f", {run.steps} steps" if run.split else ""),
                plain[run.name],
                asked.kept[run.name],
                asked.modes[run.name],
                run.whole,
            )
        )
    for left in finding.left:
        mode = asked.modes.get(left.path, "as it is")
        rows.append(Row(left.path, 1, "", plain[left.path], asked.kept[left.path], mode, left.reason))
    starts = {run.name: run.blocks[0] for run in finding.runs}
    return tuple(sorted(rows, key=lambda row: order.index(starts.get(row.path, row.path))))


def _because(row: Row) -> str:
    return f" ({row.reason})" if row.reason else ""


def spoken(gamma: Fraction) -> str:
    """A γ as it is written.

    >>> spoken(Fraction(1, 8)), spoken(Fraction(9, 10))
    ('1/8', '0.9')
    """
    return str(gamma) if gamma.numerator == 1 else f"{float(gamma):g}"


def aligned(rows: list[tuple[str, ...]], numeric: tuple[int, ...] = ()) -> str:
    """Rows of text as a table, numbers to the right.

    >>> print(aligned([("a", "n"), ("long", "1")], numeric=(1,)))
    a     n
    long  1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(w) if k in numeric else cell.ljust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
