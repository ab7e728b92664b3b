"""Every replay is proved to have found what forward computed; by default without waiting for an accelerator.

"reverse": v of some layers is hashed on the way forward (`Proven.mark`). Backward is proved where it ends: the state is taken to
the nearest of them below, and must hash to the same. An output of a block that is not that of forward moves v, and v only grows
further apart on the way down (by 1/γ a layer), so the one comparison is for all blocks above.

"checkpoint": block by block, see `ledger`. "blocks" takes outputs always, and compares them as the block is run again (`core.call`);
and, in both modes, what blocks saved for autograd: what enters gradients alone moves no output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.call import Call
from ..core.errors import ReplayError
from ..core.tape import State, Tape
from .later import Later
from .ledger import KEPT, Gradients, Ledger, at_end_of_backward

CHOICES = ("auto", "off", "end", "blocks")
EVERY = 8  # layers between two marks: so far at most a backward pass that ends in between is continued


class Proven(Tape):
    """A tape that proves that backward found the states of forward.

    Args:
        verify: "auto": told `later`, gradients stay as they are; "end", "blocks": raised at once, and gradients put back.
    """

    def __init__(self, state: State, verify: str, later: Later) -> None:
        super().__init__(state)
        self.verify, self.later = verify, later
        self.marks: dict[int, Tensor] = {}
        self.task: int | None = None  # the backward pass that was here last
        self.gradients: Gradients | None = None
        self.proved, self.rising = True, False
        # of what made the initial velocity, to which no state leads back; with "blocks", of every block
        self.noted: dict[Call, Ledger] = {}
        self.kept: Ledger | None = None  # of the blocks above, whose inputs are kept

    def mark(self, k: int) -> None:
        """Forward stands before block k."""
        if self.verify != "off" and self.lowest is not None and k >= 0 and (k % EVERY == 0 or k == self.lowest):
            self.marks[k] = self.state.mark()

    def note(self, call: Call, saved: list[Tensor], y: Any) -> None:
        if saved and (call.verified or (self.verify != "off" and call is self.calls.get(-1))):
            ledger = self.noted[call] = Ledger(1, saved[0].device, self.verify, self.later)
            ledger.note(0, call, saved, y, None)

    def check(self, call: Call, saved: list[Tensor], y: Any) -> None:
        if call in self.noted:
            self.noted[call].check(0, [*saved, y])

    def recall(self, k: int) -> Tensor:
        if self.verify == "off" or self.lost:
            return super().recall(k)
        task = torch._C._current_graph_task_id()
        if task != self.task and task != -1:
            self._begin(task)
        self.proved = False
        try:
            if self.rising and self.at > k >= 0:
                self._confirm()
            return super().recall(k)
        except BaseException:
            self._undo()
            raise

    def seek(self, k: int, lazily: bool = False) -> None:
        if self.rising and k < self.at:
            self._confirm()
        start = self.at
        super().seek(k, lazily)
        self.rising |= self.at > start

    def abandon(self, k: int) -> None:
        super().abandon(k)
        self._undo()

    def served(self) -> None:
        if self.verify != "off":
            self._prove()
        super().served()

    def _begin(self, task: int) -> None:
        if self.task is None and torch._C._autograd._get_current_graph_task_keep_graph():
            self.marks[self.at] = self.state.mark()  # so that a later pass finds its way up again
        self.task = task
        if self.verify != "auto":
            self.gradients = Gradients(p for call in self.calls.values() for p in call.parts.parameters)
        at_end_of_backward(self._end)

    def _end(self) -> None:
        """The backward pass is over; it may have ended above the first block, where nothing below was asked for."""
        if not self.proved and not self.lost:
            self._prove()
        self.gradients = None

    def _prove(self) -> None:
        if self.rising:
            self._confirm()
        k = max((m for m in self.marks if m <= self.at), default=None)
        if k is not None:
            self.seek(k)
            self._compare(k)
        self.proved, self.gradients = True, None

    def _confirm(self) -> None:
        """Blocks were run forwards again: see, a little further up, that this led where it did before."""
        self.rising = False
        k = min((m for m in self.marks if m >= self.at), default=None)
        if k is not None:
            super().seek(k)
            self._compare(k)

    def _compare(self, k: int) -> None:
        moved = self.state.mark() != self.marks[k]
        if self.verify == "auto":
            self.later.tell(moved, _judge_rewound)
        elif bool(moved):
            self._undo()
            raise ReplayError(
                "the network did not rewind to its start: some block, run again in backward, gave another output than "
                "in forward, so gradients would be wrong; they were put back. verify='blocks' names the block."
            )

    def _undo(self) -> None:
        if self.gradients is not None:
            self.gradients.restore()
            self.gradients = None
        if self.kept is not None:
            self.kept.undo()


def _judge_rewound(moved: Tensor, when: str) -> None:
    if moved.any():
        raise ReplayError(
            f"the gradients of {when} backward pass are wrong: the network did not rewind to its start, so some block, run again, "
            f"gave another output than in forward. {KEPT} in time and puts them back; verify='blocks' names the block."
        )
