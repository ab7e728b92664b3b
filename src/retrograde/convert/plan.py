"""`plan`: what `convert` would do to a model, and what that would save, before anything is changed.

Memory is predicted for four ways to run the same model: plain, every block checkpointed, every stage in reverse, and as asked
for. Each is a training step on a copy of the model without values (`memory.fake`):

    peak = max over t of (bytes alive at time t)        held = the same between forward and backward

both above parameters, gradients and batch, as `measure` reports them. Nothing is computed and nothing is allocated, so the model
may be larger than the machine. Workspaces of kernels are not seen.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..arithmetic.fixed import FixedPoint
from ..memory.budget import Step, choose, observe
from ..memory.fake import Copy, device_of, fake_copy
from ..memory.modes import MemoryPlan, parse_memory
from ..memory.peak import Peak
from ..memory.step import as_call, bytes_of
from ..memory.units import human
from ..reverse.sign import magnitude
from .convert import check_example, check_model, check_settings, look, place, stages_of
from .find import Finding
from .stage import Settings


@dataclass(frozen=True)
class Row:
    """One stage, or one block that is left out of the stages.

    Attributes:
        path: where it is.
        blocks: how many blocks it has.
        form: "block", "branch", "relu", or "" for a block left out.
        plain: bytes that the plain model keeps of it from forward to backward.
        kept: bytes that the converted model keeps.
        mode: the memory mode, or how many blocks have which: "reverse 12, keep input 23".
        reason: for a block left out, why.
    """

    path: str
    blocks: int
    form: str
    plain: int
    kept: int
    mode: str
    reason: str = ""


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
    """

    model: str
    gamma: Any
    rows: tuple[Row, ...]
    peaks: dict[str, Peak]
    parameters: int
    gradients: int
    batch: int

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

    def __str__(self) -> str:
        counted = sum(row.blocks for row in self.stages)
        title = f"{self.model}: {counted} blocks in {len(self.stages)} momentum stages, gamma = {self.gamma}"
        fixed = f"besides: parameters {human(self.parameters)}, gradients {human(self.gradients)}, batch {human(self.batch)}"
        return "\n".join(
            [title, "", aligned(self.table(), numeric=(1, 3, 4)), "", aligned(self.summary(), numeric=(1, 2, 3)), fixed]
        )

    def _repr_html_(self) -> str:
        def table(rows: list[tuple[str, ...]]) -> str:
            cells = [[html.escape(cell) for cell in row] for row in rows]
            head = "".join(f"<th>{cell}</th>" for cell in cells[0])
            body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells[1:])
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

        return f"<p><b>{html.escape(str(self).splitlines()[0])}</b></p>{table(self.table())}{table(self.summary())}"


def plan(
    model: nn.Module, example: Any, *, gamma: Any = 0.9, stages: Sequence[str] | str | None = None, form: str | None = None,
    memory: str | int | float = "auto", loss: Callable[[Any], Tensor] | None = None, autocast: torch.dtype | None = None,
    fixed_point: str | FixedPoint = "auto",
) -> Plan:  # fmt: skip
    """What `convert` with these options would do, and the memory of a training step on this example, predicted.

    Args:
        model: the model, not yet converted. It is neither run nor changed.
        example: a batch, as `measure` takes it. Only shapes and dtypes matter.
        loss: from the output to a scalar; None for the mean of squares.
        autocast: the dtype of automatic mixed precision, or None.
        gamma, stages, form, memory, fixed_point: as in `convert`.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 256, batch_first=True), 12)
    >>> row = plan(encoder, torch.randn(8, 32, 64)).stages[0]
    >>> row.path, row.blocks, row.mode
    ('layers.0-11', 12, 'reverse')
    """
    mode, budget = parse_memory(memory)
    settings = Settings(
        magnitude(gamma), form or "block", None, mode, fixed_point=fixed_point, insists=form is not None
    )
    check_settings(settings)
    check_model(model)
    check_example(example)
    args, kwargs = as_call(example)
    with fake_copy(model, args, kwargs) as fake:
        finding = look(fake.model, fake.kwargs or fake.args, stages, form)

    def step(way: Settings, plans: Mapping[str, MemoryPlan] | None = None) -> _Way:
        with fake_copy(model, args, kwargs) as fake:
            place(fake.model, finding, way)
            placed = stages_of(fake.model)
            kept = _watch(fake, finding)
            observed = observe(fake, [stage.stack for stage in placed], plans, loss, autocast, outputs=2)
            return _Way(observed, kept, {stage.name: stage.used for stage in placed})

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
        gamma,
        _rows(finding, results["plain"].kept, asked, order),
        {way: Peak(result.step.peak, result.step.held) for way, result in results.items()},
        parameters=bytes_of(model.parameters()),
        gradients=bytes_of(p for p in model.parameters() if p.requires_grad),
        batch=bytes_of(tree_leaves(example)),
    )


@dataclass
class _Way:
    """One way to run the model: the observed step, bytes that each stretch of blocks keeps, and modes by stage."""

    step: Step
    kept: dict[str, int]
    modes: dict[str, str]


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
            Row(run.name, len(run.blocks), run.form, plain[run.name], asked.kept[run.name], asked.modes[run.name])
        )
    for left in finding.left:
        mode = asked.modes.get(left.path, "as it is")
        rows.append(Row(left.path, 1, "", plain[left.path], asked.kept[left.path], mode, left.reason))
    starts = {run.name: run.blocks[0] for run in finding.runs}
    return tuple(sorted(rows, key=lambda row: order.index(starts.get(row.path, row.path))))


def _because(row: Row) -> str:
    return f" ({row.reason})" if row.reason else ""


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
