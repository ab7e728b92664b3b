"""How a run shows itself: a bar for its units, a bar for the steps of the unit at work."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

PAUSE = 10.0  # seconds between two lines of a unit
REDRAW = 0.2  # seconds; a thread of its own would take time from small networks


class Progress(Protocol):
    """Is told how a run goes."""

    def planned(self, units: int, done: int) -> None:
        """So many units in all, so many of them finished before."""

    def unit(self, name: str) -> None:
        """A unit begins."""

    def steps(self, total: int, done: int = 0) -> None:
        """The unit has so many steps, so many of them done before a kill."""

    def step(self, note: str = "") -> None:
        """A step of the unit is done."""

    def finished(self) -> None:
        """The unit is finished, and on the disk."""


class Quiet:
    """Shows nothing."""

    def planned(self, units: int, done: int) -> None: ...
    def unit(self, name: str) -> None: ...
    def steps(self, total: int, done: int = 0) -> None: ...
    def step(self, note: str = "") -> None: ...
    def finished(self) -> None: ...


class Lines:
    """A line every few seconds, for logs."""

    def __init__(self) -> None:
        self.name, self.begun, self.said = "", time.monotonic(), 0.0

    def planned(self, units: int, done: int) -> None:
        print(f"{done} of {units} units are done", flush=True)

    def unit(self, name: str) -> None:
        self.name, self.begun, self.said = name, time.monotonic(), 0.0

    def steps(self, total: int, done: int = 0) -> None: ...

    def step(self, note: str = "") -> None:
        now = time.monotonic()
        if note and now - self.said > PAUSE:
            self.said = now
            print(f"{self.name}: {note} ({now - self.begun:.0f} s)", flush=True)

    def finished(self) -> None:
        print(f"a unit is finished ({time.monotonic() - self.begun:.0f} s)", flush=True)


class Shown:
    """Bars on a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self.bars = Bars(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=console, auto_refresh=False,
        )  # fmt: skip
        self.all = self.bars.add_task("units", total=None, note="")
        self.one = self.bars.add_task("", total=None, note="", visible=False)
        self._drawn = 0.0

    def __enter__(self) -> Shown:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.update(self.one, visible=False)
        self.bars.stop()

    def planned(self, units: int, done: int) -> None:
        self.bars.update(self.all, total=units, completed=done)
        self.bars.refresh()

    def unit(self, name: str) -> None:
        self.bars.reset(self.one, total=None, description=name, note="", visible=True)
        self.bars.refresh()

    def steps(self, total: int, done: int = 0) -> None:
        self.bars.update(self.one, total=total, completed=done)

    def step(self, note: str = "") -> None:
        self.bars.update(self.one, advance=1, note=note)
        if time.monotonic() - self._drawn > REDRAW:
            self._drawn = time.monotonic()
            self.bars.refresh()

    def finished(self) -> None:
        self.bars.advance(self.all)
        self.bars.refresh()
