"""`plan`: what `convert` would do to a model, and what that would save, before anything is changed.

Memory is predicted for four ways to run the same model: plain, every block checkpointed, every stage in reverse, and as asked
for. Each is a training step on a copy of the model without values (`memory.fake`):

    peak = max over t of (bytes alive at time t)        held = the same between forward and backward

both above parameters, gradients and batch, as `measure` reports them. Nothing is computed and nothing is allocated, so the model
may be larger than the machine. Of the memory that kernels allocate inside, what is known is added (`memory.fake`).

Time is predicted from the bytes that each block saves (`Track.work`): nothing is timed.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..arithmetic.buffers import buffers
from ..arithmetic.fixed import FixedPoint
from ..memory.budget import Step, choose, observe
from ..memory.fake import Copy, device_of, fake_copy, mode_of
from ..memory.modes import Budget, MemoryPlan, buffer_bytes, parse_memory
from ..memory.peak import Peak
from ..memory.schedule import with_reserve
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


WORTH = 0.05
"""The least share of checkpointing's memory that a conversion must save to be advised."""
WIDTH = 80
"""Columns of a terminal."""


@dataclass(frozen=True)
class Plan:
    """What would be converted, and the memory of a training step, predicted.

    Attributes:
        model: the class of the model.
        gamma: γ.
        rows: the stages and the blocks left out.
        peaks: bytes above parameters, gradients and batch, by way of running: "plain", "checkpoint", "reverse" and "auto" (or
            the mode asked for).
        times: the time of a step, relative to plain, by way of running.
        asked: the way that was asked for.
        parameters, gradients, batch: their bytes.
        gammas: the same model with every stage in reverse, at some γ.
        room: bytes that there are for activations, if known: the budget, or what parameters, gradients and batch leave of a GPU.
    """

    model: str
    gamma: Any
    rows: tuple[Row, ...]
    peaks: dict[str, Peak]
    times: dict[str, float]
    asked: str
    parameters: int
    gradients: int
    batch: int
    gammas: tuple[GammaRow, ...] = ()
    room: int | None = None

    @property
    def stages(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.form)

    @property
    def left(self) -> tuple[Row, ...]:
        """The blocks left out."""
        return tuple(row for row in self.rows if not row.form)

    @property
    def verdict(self) -> str:
        """What to do, in one sentence. A conversion is advised only where it saves memory, or fits where checkpointing does not."""
        needed = {way: with_reserve(peak.peak) for way, peak in self.peaks.items()}
        plain, checkpoint, converted = needed["plain"], needed["checkpoint"], needed[self.asked]
        time = f"at about {self.times[self.asked] / self.times['checkpoint']:.2f}× its time"
        if self.room is not None:
            if plain <= self.room:
                return f"plain fits: nothing to do ({human(plain)} of {human(self.room)})"
            if min(checkpoint, converted) > self.room:
                return f"nothing fits: the least is {human(min(checkpoint, converted))}, and there are {human(max(self.room, 0))}"
            if checkpoint > self.room:
                return f"converting fits where checkpointing does not, {time}"
        saved = 1 - converted / checkpoint
        if saved >= WORTH:
            return f"converting saves {100 * saved:.0f} % over checkpointing {time}"
        if min(checkpoint, converted) > (1 - WORTH) * plain:
            return "plain is as good here: its peak is outside of the blocks"
        short = not any("reverse" in row.mode for row in self.stages)
        why = "stages are short" if short else "the peak is outside of the stages"
        return f"checkpointing is as good here: {why}"

    def table(self) -> list[tuple[str, ...]]:
        """The rows as text, with a header."""
        header = ("stage", "blocks", "form", "plain", "converted", "mode")
        return [header, *(
            (row.path, str(row.blocks), row.form or "left out", human(row.plain), human(row.kept), row.mode) for row in self.rows
        )]  # fmt: skip

    def reasons(self) -> list[str]:
        """Why blocks are left out: a line for each reason."""
        paths: dict[str, list[str]] = {}
        for row in self.left:
            paths.setdefault(row.reason, []).append(row.path)
        return [f"{', '.join(found)}: left out; {reason}" for reason, found in paths.items() if reason]

    def summary(self) -> list[tuple[str, ...]]:
        """Peak and held memory, and time, by way of running, as text, with a header."""
        plain = self.peaks["plain"].peak
        header = ("one step", "peak", "held", "of plain", "time")
        return [header, *(
            (name, human(peak.peak), human(peak.held), f"{peak.peak / plain:.2f}×", f"{self.times[name]:.2f}×")
            for name, peak in self.peaks.items()
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
        tried = any(row.distance is not None for row in self.gammas)
        return [header, *rows] if tried else [row[:-1] for row in (header, *rows)]

    @property
    def title(self) -> str:
        counted = sum(row.blocks for row in self.stages)
        return f"{self.model}: {counted} blocks in {len(self.stages)} momentum stages, gamma = {self.gamma}"

    @property
    def besides(self) -> str:
        return (
            f"besides parameters {human(self.parameters)}, gradients {human(self.gradients)}, batch {human(self.batch)}"
        )

    def text(self, summary: list[tuple[str, ...]], besides: str) -> str:
        """The plan for a terminal, with this table of memory."""
        why = "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in self.reasons())
        memory = f"{aligned(summary)}\n{textwrap.fill(besides, WIDTH)}"
        stages = aligned(self.table(), left=(0, 2, 5))
        parts = (
            self.verdict,
            textwrap.fill(self.title, WIDTH),
            f"{stages}\n{why}".rstrip(),
            memory,
            aligned(self.by_gamma(), left=()),
        )
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.text(self.summary(), self.besides)

    def _repr_html_(self) -> str:
        def table(rows: list[tuple[str, ...]]) -> str:
            cells = [[html.escape(cell) for cell in row] for row in rows]
            head = "".join(f"<th>{cell}</th>" for cell in cells[0])
            body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells[1:])
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

        lines = "".join(f"<p>{html.escape(line)}</p>" for line in (self.title, *self.reasons(), self.besides))
        tables = "".join(map(table, (self.table(), self.summary(), self.by_gamma())))
        return f"<p><b>{html.escape(self.verdict)}</b></p>{lines}{tables}"


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
    with _a_copy(model, args, kwargs) as fake:
        finding = look(fake.model, fake.kwargs or fake.args, stages, form, split)
    tried = trial(model, example, finding, settings, autocast) if isinstance(gamma, str) else None
    if tried is not None:
        settings = replace(settings, gamma=tried.nearest())

    def step(way: Settings, plans: Mapping[str, MemoryPlan] | None = None) -> _Way:
        with _a_copy(model, args, kwargs) as fake:
            place(fake.model, finding, way)
            placed = stages_of(fake.model)
            kept = _watch(fake, finding)
            observed = observe(fake, [stage.stack for stage in placed], plans, loss, autocast, outputs=2)
            momentum = {stage.name: stage.recurrence for stage in placed if not stage.checkpointed}
            return _Way(observed, kept, {stage.name: stage.used for stage in placed}, momentum)

    def seconds(way: _Way) -> float:
        """The time of a step, relative to plain."""
        own, again = (sum(part) for part in zip((0.0, 0.0), *(t.work for t in way.step.tracks.values()), strict=True))
        return 1 + again / own if own else 1.0

    results = {
        "plain": step(replace(settings, gamma=0, memory="store")),
        "checkpoint": step(replace(settings, gamma=0, memory="checkpoint")),
        "reverse": step(replace(settings, memory="reverse")),
    }
    asked = step(settings)
    if budget is not None:
        asked = step(settings, choose(lambda plans: step(settings, plans).step, asked.step, budget, device_of(model)))
    results[mode] = asked
    device = device_of(model)
    constant = (
        bytes_of(model.parameters()),
        bytes_of(p for p in model.parameters() if p.requires_grad),
        bytes_of(tree_leaves(example)),
    )
    room = budget.bytes(device) if budget is not None else None
    if room is None and device.type == "cuda" and mode_of(model) is None:
        room = Budget(1.0, 1.0).bytes(device) - sum(constant)
    order = [path for path, _ in model.named_modules()]
    return Plan(
        type(model).__name__,
        next(g for g in (settings.gamma if tried else gamma, finding.runs[0].gamma, GAMMA) if g is not None),
        _rows(finding, results["plain"].kept, asked, order),
        {way: Peak(result.step.peak, result.step.held) for way, result in results.items()},
        {way: seconds(result) for way, result in results.items()},
        mode,
        *constant,
        gammas=tuple(
            _at(g, results["reverse"], None if tried is None else tried.distance(g))
            for g in sorted({*GAMMAS, *(() if tried is None else (settings.gamma,))})
        ),
        room=room,
    )


@contextmanager
def _a_copy(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Copy]:
    """A copy of the model without values, to run. Says what to do if it cannot be run."""
    try:
        with fake_copy(model, args, kwargs, guesses=True) as fake:
            yield fake
    except RuntimeError as error:
        raise RuntimeError(
            f"{type(model).__name__} failed in a step on tensors without values, by which memory is predicted ({type(error).__name__}: "
            f"{error}). If it runs on this example, rg.measure(model, example) measures it, before and after rg.convert."
        ) from error


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


def spoken(gamma: Fraction) -> str:
    """A γ as it is written.

    >>> spoken(Fraction(1, 8)), spoken(Fraction(9, 10))
    ('1/8', '0.9')
    """
    return str(gamma) if gamma.numerator == 1 else f"{float(gamma):g}"


def aligned(rows: list[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> str:
    """Rows of text as a table in 80 columns: the columns in `left` begin together, the others end together.

    Where it is too wide, the first column loses its middle and the last goes on in the next line.

    >>> print(aligned([("a", "n"), ("long", "1")]))
    a     n
    long  1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if over > 0:
        widths[0] = max(widths[0] - over, min(widths[0], 20))
        widths[-1] = WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1)
    lines = []
    for first, *between, last in rows:
        shown = first if len(first) <= widths[0] else f"{first[: (widths[0] - 1) // 2]}…{first[-(widths[0] // 2) :]}"
        for part in textwrap.wrap(last, widths[-1]) or [""]:
            cells = zip((shown, *between, part), widths, strict=True)
            lines.append("  ".join(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(cells)).rstrip())
            shown, between = "", [""] * len(between)
    return "\n".join(lines)
