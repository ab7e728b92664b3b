"""The tape: where a block's input comes from when it is run again. The state is rewound to it, one step after another.

recall(k)        go where x_k can be read. Returns x_k
settle(k, y)     block k gave y on it: y is owed to the state. The next recall finishes the step back, in one pass over memory
seek(k)          run blocks, either way, until the state is that of layer k

Between calls the state is at layer `at`; or `pulled`: x of layer at − 1 can be read, and its block has not answered yet (if it failed,
`failed` is that x, for another attempt); or `owed`: the second half of undoing step `at` is still to be done; or `lost`.
"""

from __future__ import annotations

from torch import Tensor

from .checks import Checks
from .replay import Call
from .scheme import State, keeps_graph

INTERRUPTED = "An earlier backward pass through this network was interrupted. Run the forward pass again."


class Tape:
    """The integer state of one forward pass and the calls that led to it. Call −1, if any, made the initial velocity."""

    needs_output = True  # a replay must run to its end

    def __init__(self, state: State, checks: Checks | None) -> None:
        self.state = state
        self.checks = checks
        self.calls: dict[int, Call] = {}
        self.at = 0
        self.pulled = False
        self.failed: Tensor | None = None
        self.owed: Tensor | None = None
        self.lowest: int | None = None  # the first block that saved anything, so the last to be replayed
        self.marked: int | None = None  # the layer whose state was hashed on the way forward
        self.lost = ""  # why there is nothing to go on from: a step that stops half-way leaves nothing

    def note(self, k: int, call: Call, saves: bool, state: State) -> None:
        """Forward stands before the step of block k, which was run by this call; whether it saves anything to replay."""
        self.calls[k] = call
        if saves and self.lowest is None:
            self.lowest = k
        if self.checks is not None and self.marked is None and self.lowest is not None and k >= 0:
            self.marked = k
            self.checks.of_state.copy_(self.state.hash())

    def recall(self, k: int) -> Tensor:
        if self.at <= k or k < 0:
            self.seek(max(k, 0))
            return self.state.pull(k) if k < 0 else self.state.read()
        if self.at != k + 1:
            self.seek(k + 1, lazily=True)
        return self._pull()

    def settle(self, k: int, y: Tensor, now: bool) -> None:
        if self.pulled:  # the step back is owed. No call, and so no signal, comes in between
            self.pulled = False
            self.at = k
            self.owed = y
        if k == self.lowest:
            self._served()
        if now and not self.lost:
            self.seek(self.at)

    def pass_by(self, k: int) -> None:
        """Go back past block k, which has nothing to replay, if that will be needed."""
        if self.lowest is not None and self.lowest < k < self.at and not self.lost:
            self.seek(k)  # to the end: what is owed may be a view of a parameter

    def abandon(self, x: Tensor) -> None:
        """The replay on this input failed. The next one begins with it."""
        if self.pulled:
            self.failed = x.detach()

    def seek(self, k: int, lazily: bool = False) -> None:
        """Go to layer k. `lazily`: the last step back may be left half done."""
        if self.lost:
            raise RuntimeError(self.lost)
        while self.at > k or self.pulled:
            y = self._output(self.at - 1, self._pull())
            self.pulled = False
            self.at -= 1
            self.owed = y
        if self.owed is not None and not lazily:
            self.lost = INTERRUPTED
            y, self.owed = self.owed, None
            self.state.retreat(self.at, y)
            self.lost = ""
        while self.at < k:
            y = self._output(self.at, self.state.read())
            self.lost = INTERRUPTED
            self.state.advance(self.at, y)
            self.at += 1
            self.lost = ""

    def _pull(self) -> Tensor:
        """Take the first half of a step back, and what is owed of the one before. Returns the block's input."""
        if self.lost or (self.pulled and self.failed is None):
            raise RuntimeError(self.lost or INTERRUPTED)
        if self.pulled:
            again, self.failed = self.failed, None
            assert again is not None
            return again
        self.lost = INTERRUPTED
        y, self.owed = self.owed, None
        x = self.state.pull(self.at - 1) if y is None else self.state.recede(self.at, y)
        self.pulled = True
        self.lost = ""
        return x

    def _output(self, k: int, x: Tensor) -> Tensor:
        """Block k again, for its output alone."""
        saved: list[Tensor] = []
        try:
            return self.calls[k].again(x, saved)
        except BaseException:
            self.abandon(x)
            raise
        finally:
            saved.clear()

    def _served(self) -> None:
        """Block `lowest` has been replayed: the state must be what it was there."""
        keep = keeps_graph()
        if self.checks is not None and self.marked is not None:
            self.seek(self.marked)
            self.checks.rewound(self.state.hash())
        if not keep:
            self.state.free()
            self.owed = None
            self.lost = (
                "The backward pass of this network has run. To run it twice, pass retain_graph=True to the first. (If it has run "
                "once only, a Function in the first block reads ctx.saved_tensors twice: read it once, into variables.)"
            )
