"""What the demo shows: a progress bar per network while they train, one table, one figure."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from ..memory import duration, human
from .demo import GAMMA, WAYS, Outcome, Setting

COLOURS = dict(zip(WAYS, ("#6b7280", "#2563eb", "#ea580c"), strict=True))
LINES: dict[str, Any] = dict(zip(WAYS, ("-", (0, (2, 2)), "-"), strict=True))  # the first two coincide
REDRAW = 9  # steps between two drawings of the bars, so that drawing does not change the step times


def opening(setting: Setting) -> Text:
    """One sentence before the training."""
    return Text.assemble(
        ("Retrograde demo. ", "bold"),
        f"Handwritten digits, a residual network of {setting.depth} blocks, trained three ways from the same weights "
        "on the same batches, a step of each in turn.\n",
    )


class Progress:
    """A bar for each network, with its loss and its accuracy on the test images."""

    def __init__(self, console: Console) -> None:
        self.bars = Bars(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"), TextColumn("test accuracy {task.fields[accuracy]}"),
            console=console, auto_refresh=False,
        )  # fmt: skip
        self.tasks = {
            way: self.bars.add_task(f"[{COLOURS[way]}]{way}", total=None, loss="–".rjust(6), accuracy="–".rjust(6))
            for way in WAYS
        }
        self.steps = 0

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def planned(self, steps: int) -> None:
        for task in self.tasks.values():
            self.bars.update(task, total=steps)

    def stepped(self, way: str, loss: float) -> None:
        self.bars.update(self.tasks[way], advance=1, loss=f"{loss:6.3f}")
        self.steps += 1
        if self.steps % REDRAW == 0:
            self.bars.refresh()

    def tested(self, way: str, accuracy: float) -> None:
        self.bars.update(self.tasks[way], accuracy=f"{accuracy:6.1%}")
        self.bars.refresh()

    def measuring(self, depths: list[int]) -> None:
        self.bars.console.print(f"Measuring the memory of a training step at depths {', '.join(map(str, depths))} …")


def table(outcome: Outcome) -> Table:
    """Accuracy, memory and time, each also as a ratio to the plain network."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("trained", no_wrap=True, vertical="bottom")
    for heading in ("test\naccuracy", "activation\nmemory, peak", "step\ntime"):
        shown.add_column(heading, justify="right", no_wrap=True)
        shown.add_column("\n×", justify="right", no_wrap=True, style="dim")
    plain = next(iter(outcome.results.values()))
    for way, result in outcome.results.items():
        shown.add_row(
            Text(way, style=COLOURS[way]),
            f"{result.accuracy[-1]:.1%}", f"{result.accuracy[-1] / plain.accuracy[-1]:.2f}",
            human(result.peak), f"{result.peak / plain.peak:.2f}",
            duration(result.times.median), f"{result.times.ratio(plain.times):.2f}",
        )  # fmt: skip
    return shown


def reading(outcome: Outcome) -> Text:
    """What the numbers mean, and what to try next."""
    shallow, deep = min(outcome.setting.depths), max(outcome.setting.depths)
    results = outcome.results.values()
    growth = [f"{result.peaks[deep] / result.peaks[shallow]:.1f}×" for result in results]
    grown = [human(result.resident) for result in results if result.resident is not None]
    resident = (
        f" At depth {max(next(iter(results)).peaks)} the process itself grew by {', '.join(grown)} (resident memory)."
        if grown
        else ""
    )
    return Text(
        f"× is the ratio to plain. Memory is the most allocated at once in a step on {outcome.setting.batch} images, beyond "
        f"parameters and gradients, every allocation counted; from depth {shallow} to {deep} it grew "
        f"{', '.join(growth[:-1])} and {growth[-1]}.{resident} The momentum network (γ = {GAMMA}) ran backward to its start in every "
        "step, and checked it bit for bit. Checkpointing has plain's weights; its accuracy may differ, because torch.utils.checkpoint "
        "moves BatchNorm's running statistics twice a step.\n"
        f"Next:\n  {_command()} demo --depth 100\n"
        "or, with blocks of your own, rg.MomentumNet(blocks, gamma=0.9).\n"
    )


def _command() -> str:
    """What to type for this command here: it may be in a virtual environment that is not activated."""
    found = shutil.which("retrograde")
    return "retrograde" if found or not Path(sys.argv[0]).is_file() else os.path.relpath(sys.argv[0])


def figure(outcome: Outcome, path: Path) -> Path:
    """Learning curves, memory, and memory over depth, as one picture."""
    import matplotlib

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        picture = Figure(figsize=(12.4, 4), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        curves, bars, depths = picture.subplots(1, 3, width_ratios=(1.05, 1, 1.05))
        _curves(curves, outcome)
        _bars(bars, outcome)
        _depths(depths, outcome)
        handles = curves.get_legend_handles_labels()
        picture.legend(*handles, loc="outside lower center", ncols=len(WAYS), frameon=False, fontsize=10.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=130)
    return path


def _curves(axes: Any, outcome: Outcome) -> None:
    for way, result in outcome.results.items():
        epochs = range(1, len(result.loss) + 1)
        axes.plot(epochs, result.loss, color=COLOURS[way], linestyle=LINES[way], lw=2.2, label=way)
    axes.set(title="Training loss", xlabel="epoch", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)


def _bars(axes: Any, outcome: Outcome) -> None:
    peaks = {way: result.peak / 1e6 for way, result in outcome.results.items()}
    drawn = axes.bar(range(len(peaks)), list(peaks.values()), color=[COLOURS[way] for way in peaks], width=0.62)
    labels = [
        f"{human(result.peak)}\n{result.accuracy[-1]:.1%} right\n{duration(result.times.median)} a step"
        for result in outcome.results.values()
    ]
    axes.bar_label(drawn, labels, padding=3, fontsize=9)
    axes.set(title=f"A training step at depth {outcome.setting.depth}", ylabel="peak activation memory (MB)", xticks=[])
    axes.set(xlim=(-0.65, len(peaks) - 0.35), ylim=(0, 1.25 * max(peaks.values())))


def _depths(axes: Any, outcome: Outcome) -> None:
    for way, result in outcome.results.items():
        peaks = [peak / 1e6 for peak in result.peaks.values()]
        axes.plot(list(result.peaks), peaks, "o-", color=COLOURS[way], lw=2.2, ms=5)
    axes.set(title="Memory over depth", xlabel="residual blocks", ylabel="peak activation memory (MB)")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.25)
