"""The tape: where the integer state stands, and how it gets to where a block's input is needed.

Each block runs under ordinary autograd with saved-tensor hooks that keep nothing (`Frame`). When backward first asks a
frame for one of its tensors, the frame asks for the block's input again, runs the block, and has them all. In "reverse"
mode the input comes from the `Tape`, which undoes one step after another as backward goes; in "checkpoint" mode
it was kept (`Kept`). The graph is the genuine one, so everything that works with autograd works here.

    recall(k)    stand where x_k can be read; x_k
    settle(k, y) block k gave y on it: the step back is finished when the next one begins, in one pass over memory (or `now`)
    seek(k)      run blocks, either way, until the state is that of layer k
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .call import WHEN_NOT_REPEATED, Call, version
from .errors import ReplayError


class State(Protocol):
    """The state of a reversible scheme: steps that can be taken back. Block k takes it from layer k to layer k + 1."""

    def read(self) -> Tensor: ...  # the next block's input
    def advance(self, k: int, y: Tensor) -> Tensor: ...  # block k gave y: take the step; the next block's input
    def pull(self) -> Tensor: ...  # first half of a step back: the last block's input again
    def push(self) -> None: ...  # undo `pull`
    def retreat(self, k: int, y: Tensor) -> None: ...  # second half: block k gave y on it
    def recede(self, k: int, y: Tensor) -> Tensor: ...  # `retreat`, then the next `pull`
    def mark(self) -> Tensor: ...  # a hash of where it stands
    def free(self) -> None: ...


class Kept:
    """One block's input, kept; to a frame, the same as a tape."""

    needs_output = False  # of the block that is run again

    def __init__(self, x: Tensor) -> None:
        self.hold(x)

    def hold(self, x: Tensor) -> None:
        self.x, self.version = x, x._version

    def recall(self, k: int) -> Tensor:
        if self.x._version != self.version:
            raise ReplayError(
                f"the input of block {k}, kept for its backward pass, was changed. Change a copy instead."
            )
        return self.x.detach()

    def note(self, call: Call, saved: list[Tensor], y: Any) -> None: ...
    def check(self, call: Call, saved: list[Tensor], y: Any) -> None: ...
    def settle(self, k: int, y: Any, now: bool) -> None: ...
    def abandon(self, k: int) -> None: ...
    def pass_by(self, k: int) -> None: ...


class Tape:
    """The integer state of one forward pass and the calls that led to it. Call −1, if any, made the initial velocity."""

    needs_output = True

    def __init__(self, state: State) -> None:
        self.state = state
        self.calls: dict[int, Call] = {}
        self.at, self.pulled = 0, False
        self.owed: Tensor | None = None  # the output of block `at`: the last step back is still to be finished with it
        self.lowest: int | None = None  # the first call that has anything to replay: past it the tape has served
        self.lost = ""  # why there is nothing to go on from

    def recall(self, k: int) -> Tensor:
        if self.lost:
            raise RuntimeError(self.lost)
        if self.at <= k or k < 0:
            self.seek(max(k, 0))
            return self.state.read()
        self.seek(k + 1, lazily=True)
        return self._pull()

    def note(self, call: Call, saved: list[Tensor], y: Any) -> None: ...
    def check(self, call: Call, saved: list[Tensor], y: Any) -> None: ...
    def settle(self, k: int, y: Tensor, now: bool) -> None:
        if self.pulled:
            self.pulled, self.at, self.owed = False, k, y
        if k == self.lowest:
            self.served()
        self.seek(self.at, lazily=not now)

    def pass_by(self, k: int) -> None:
        """Go back past block k, which has nothing to replay, if that will be needed."""
        if self.lowest is not None and self.lowest < k < self.at and not self.lost:
            self.seek(k)  # to the end: what is owed may be a view of a parameter

    def abandon(self, k: int) -> None:
        """The block failed: stand where the state stood before `recall`."""
        if self.pulled:
            self.state.push()
            self.pulled = False

    def seek(self, k: int, lazily: bool = False) -> None:
        while self.at > k:
            x = self._pull()
            try:
                self.owed = self._output(self.at - 1, x)
            except BaseException:
                self.state.push()
                raise
            finally:
                self.pulled = False
            self.at -= 1
        if self.owed is not None and not lazily:
            y, self.owed = self.owed, None
            self._whole(self.state.retreat, self.at, y)
        while self.at < k:
            self._whole(self.state.advance, self.at, self._output(self.at, self.state.read()))
            self.at += 1

    def return_to(self, k: int) -> None:
        """Forward goes on from layer k, though a backward pass has been here in between."""
        if self.lost:
            raise RuntimeError(self.lost)
        self.seek(k)

    def _output(self, k: int, x: Tensor) -> Tensor:
        """Block k again, for its output alone."""
        saved: list[Tensor] = []
        try:
            return self.calls[k].again(x, saved)
        finally:
            saved.clear()  # its tensors know the hooks, and the hooks know it: a circle that nobody else breaks

    def _pull(self) -> Tensor:
        y, self.owed = self.owed, None
        x: Tensor = self._whole(self.state.pull) if y is None else self._whole(self.state.recede, self.at, y)
        self.pulled = True
        return x

    def _whole(self, step: Callable[..., Any], *args: Any) -> Any:
        """A step of the state; one that stops half-way leaves nothing to go on from."""
        self.lost = "An earlier backward pass through this network was interrupted. Run the forward pass again."
        result = step(*args)
        self.lost = ""
        return result

    def served(self) -> None:
        """The last block that has anything to replay has been replayed."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.state.free()
            self.owed = None
            self.lost = (
                "The backward pass of this network has run. To run it twice, pass retain_graph=True to the first. (If it has run "
                "once only, a Function in the first block reads ctx.saved_tensors twice: read it once, into variables.)"
            )


class Frame:
    """One block in the graph: keeps nothing of what autograd wants saved, and finds it again when asked."""

    def __init__(self, call: Call, source: Tape | Kept, k: int) -> None:
        self.call, self.source, self.k = call, source, k
        self.eager = False  # its output may be changed by what runs before the next replay
        self.shapes: list[torch.Size] = []
        self.saved: list[Any] = []  # tensors, until they are asked for
        self.fresh: list[Tensor] = []  # while the block is in its first run: what it has saved so far

    def run(self, x: Tensor, look: Callable[[list[Tensor]], None] | None = None) -> Any:
        """Run the block for the first time. `look` is shown what a plain run would have kept."""
        fresh, versions = self.fresh, list[int]()

        def pack(t: Tensor) -> int:
            fresh.append(t)
            versions.append(t._version)
            return len(fresh) - 1

        try:
            y = self.call.first(x, pack, self.unpack)
            if list(map(version, fresh)) != versions:
                raise ReplayError(
                    f"{self.call.name} changed a tensor in place that autograd had saved for a gradient. Use the operation that "
                    "is not in place."
                )
            self.shapes = [t.shape for t in fresh]
            self.ends_saved = bool(fresh) and isinstance(y, Tensor) and torch._C._is_alias_of(fresh[-1], y)  # type: ignore
            self.source.note(self.call, fresh, y)
            if look is not None:
                look(fresh)
            if any(p._post_accumulate_grad_hooks for p in self.call.parts.parameters) and y.requires_grad:
                self.eager = True  # the output may be a view of a parameter
                y.register_hook(self.prepare)
            return y
        finally:
            fresh.clear()

    def unpack(self, index: int) -> Tensor:
        if not self.saved or self.saved[index] is None:
            if self.fresh:
                self.call.differentiates = True
                return self.fresh[index]
            self.replay()
        t, self.saved[index] = self.saved[index], None
        return t

    def prepare(self, gradient: Tensor) -> None:
        """Run the block again before any gradient of its parameters is there: an optimizer in backward would change them."""
        if self.shapes and all(t is None for t in self.saved):
            self.replay()
        elif not self.shapes:
            self.source.pass_by(self.k)

    def replay(self) -> None:
        saved: list[Tensor] = []
        partial = not (self.source.needs_output or self.ends_saved or self.call.checksum is not None)
        x = self.source.recall(self.k)
        try:
            y = self.call.again(x, saved, len(self.shapes) if partial else None)
            if [t.shape for t in saved] != self.shapes:
                raise ReplayError(
                    f"{self.call.name} did not repeat itself: run again in backward it saved {len(saved)} tensors for autograd, "
                    f"against {len(self.shapes)} in forward, or tensors of other shapes. {WHEN_NOT_REPEATED}"
                )
            self.source.check(self.call, saved, y)
        except BaseException:
            saved.clear()  # its tensors know the hooks, and the hooks know it: a circle that nobody else breaks
            self.source.abandon(self.k)
            raise
        try:
            self.source.settle(self.k, y, self.eager)
        except BaseException:
            saved.clear()
            raise
        self.saved = list(saved)
        saved.clear()  # the replay's own graph, if anything keeps it, is not to keep these
