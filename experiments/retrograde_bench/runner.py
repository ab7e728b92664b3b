"""All methods of a case, taken in turns.

First each method by itself: built from the shared weights, gradients checked, peak memory measured (a method that runs out of
memory, raises, or whose package is missing becomes a row that says so). Then the times of those that ran: rounds in which
every method takes one step, every other round in the opposite order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch._dynamo
from torch import Tensor

from retrograde_experiments.private import Times, human, interleave

from .cases import Case
from .methods import BASELINE, Method, Missing, Setup, choose
from .record import Row, ratio
from .resident import growth
from .step import Agreement, captured, free, largest_batch, memory, training_step, zero_gradients

Say = Callable[[str], None]
Run = Callable[[], None]
_VERSIONS = 64  # of one compiled function: a ResNet's blocks differ by stage


@dataclass(frozen=True)
class Options:
    """Of a run.

    Attributes:
        methods: as they are written; none for the standard ones of each case. `without`: parts of names to leave out.
        size: of the cases.
        limit: bytes, to look for the largest batch.
        until: the time.monotonic() after which nothing new is begun.
        resident: whether a fresh process measures resident memory.
    """

    methods: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    repeats: int = 7
    warmup: int = 1
    gamma: float = 0.9
    device: str = "cpu"
    backend: str = "inductor"
    size: str = "smoke"
    resident: bool = False
    limit: int | None = None
    until: float = float("inf")

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until


def run_case(case: Case, options: Options, say: Say, facts: Row | None = None) -> Iterator[Row]:
    """The rows of one case: failures as they happen, the rest when the times are in.

    Args:
        facts: a row with what is known of the run.
    """
    device = torch.device(options.device)
    torch._dynamo.reset()  # what was compiled for the last case is of no use here
    torch._dynamo.config.recompile_limit = _VERSIONS
    torch.manual_seed(0)
    network = case.network().to(device)
    if case.planes:
        network.to(memory_format=case.layout)  # type: ignore[call-overload]
    x = case.inputs(case.batch, device)
    setup = Setup(case, network, options.gamma, options.backend)
    zero_gradients(setup, x)
    blank = replace(
        facts or Row(), case=case.name, title=case.title, cast=network.cast_bytes() if case.autocast else 0,
        activations=network.activations * case.batch,
    )  # fmt: skip
    agreement, steps, rows = Agreement(x), {}, {}
    for method in choose(case, options.methods, options.without):
        row = replace(blank, method=method.name)
        if options.late:
            yield replace(row, status="not run", note="out of time")
            continue
        row, step = _alone(method, setup, x, row, agreement, options, say)
        if row.peak is not None:
            setup.peaks[method.name] = row.peak
        if step is None:
            yield row
        else:
            rows[method.name], steps[method.name] = row, step
    agreement.forget()
    found = rows if "untimed" in case.options else _timed(rows, steps, options, device, say)
    base = found.get(BASELINE, Row())
    for row in found.values():
        ratios = {"time_ratio": ratio(row.median, base.median), "memory_ratio": ratio(row.peak, base.peak)}
        yield replace(row, **ratios)  # type: ignore[arg-type]
    del setup, network, x, steps, agreement
    free(device)


def _alone(
    method: Method, setup: Setup, x: Tensor, row: Row, agreement: Agreement, options: Options, say: Say
) -> tuple[Row, Run | None]:
    """Memory and gradients of one method, and its step for the rounds; None if it does not run."""
    began, device = time.monotonic(), x.device
    run: Run | None = None
    try:
        if method.share is not None:
            row = replace(row, budget=setup.room(*method.share))
        net = method.build(setup)
        run = step = training_step(method, net, x, setup.case)
        if method.twin is None:
            step()  # whatever happens once: compilation, calibration
        else:
            row = replace(row, gradients=agreement.check(method, setup, net))
        if method.graphed:
            run, bytes_ = captured(step, device)
            row = replace(row, peak=bytes_, uncached=bytes_)
            if row.gradients == "equal" and agreement.differing(run, setup):
                row = replace(row, gradients="differs when replayed")
        else:
            taken = memory(step, device)
            row = replace(row, peak=taken.peak, uncached=taken.peak, held=taken.held)
        plain_cast = setup.case.autocast is not None and not method.compiles and not method.graphed
        if plain_cast and method.twin is None:  # ours keeps no weights that autocast has cast
            bare = training_step(method, net, x, setup.case, cached=False)
            row = replace(row, uncached=memory(bare, device).peak)
        if options.resident and method.share is None:
            row = replace(row, resident=growth(setup.case.name, options.size, method.name, setup.gamma))
    except Missing as error:
        row = replace(row, status="not run", note=str(error))
    except torch.OutOfMemoryError:
        row = replace(row, status="out of memory")
    except Exception as error:  # whatever a method raises is its result
        row = replace(row, status="raised", note=f"{type(error).__name__}: {_first_line(error)}")
    if row.status != "ok":
        agreement.forget()
        free(device)
    elif options.limit is not None and not method.graphed:
        row = _with_largest(row, method, setup, options.limit, device)
    told = [human(bytes_) for bytes_ in (row.peak, row.resident) if bytes_ is not None] or [row.note]
    figures = " resident ".join(told)
    say(f"  {method.name:<44} {row.status:<13} {figures}  {row.gradients}  [{time.monotonic() - began:.0f} s]")
    return row, run if row.status == "ok" else None


def _with_largest(row: Row, method: Method, setup: Setup, limit: int, device: torch.device) -> Row:
    try:
        return replace(row, largest=largest_batch(method, setup, limit), limit=limit)
    except Exception as error:  # the row's other figures stand
        free(device)
        return replace(row, limit=limit, note=f"largest batch: {type(error).__name__}: {_first_line(error)}")


def _timed(
    rows: dict[str, Row], steps: dict[str, Run], options: Options, device: torch.device, say: Say
) -> dict[str, Row]:
    """The rounds, and the rows with their times."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    for turn in range(options.warmup + options.repeats):
        if options.late and turn > options.warmup:
            say(f"  out of time after {turn - options.warmup} rounds")
            break
        began = time.monotonic()
        order = [name for name in (steps if turn % 2 == 0 else reversed(list(steps))) if name not in failed]
        for name in order:
            try:
                taken = interleave({name: steps[name]}, repeats=1, warmup=0, device=device)[name]
            except Exception as error:  # one method's failure is not the others'
                failed[name] = f"{type(error).__name__}: {_first_line(error)}"
                free(device)
                continue
            if turn >= options.warmup:
                seconds[name] += taken.seconds
        say(f"  round {turn + 1} of {options.warmup + options.repeats}  [{time.monotonic() - began:.1f} s]")
    return {name: _with_times(row, seconds[name], failed.get(name)) for name, row in rows.items()}


def _with_times(row: Row, seconds: list[float], failure: str | None) -> Row:
    if failure is not None:
        return replace(row, status="raised", note=f"when timed: {failure}")
    if not seconds:
        return replace(row, status="not run", note="when timed: out of time")
    times = Times(tuple(1e3 * s for s in seconds))
    lower, upper = times.quartiles
    return replace(row, median=times.median, lower=lower, upper=upper, best=times.min, repeats=len(times.seconds))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
