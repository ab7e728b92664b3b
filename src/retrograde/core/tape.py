"""The tape: where the integer state stands, and how it gets to where a block's input is needed.

Each block runs under ordinary autograd with saved-tensor hooks that keep nothing (`Frame`). When backward first asks a
frame for one of its tensors, the frame asks for the block's input again, runs the block, and has them all. In "reverse"
mode the input comes from the `Tape`, which undoes one step after another as backward goes; in "checkpoint" mode
it was kept (`Kept`). The graph is the genuine one, so everything that works with autograd works here.

    recall(k)    stand where x_k can be read; x_k
    settle(k, y) block k gave y on it: finish the step back
    seek(k)      run blocks, either way, until the state is that of layer k
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from .call import Call
from .errors import ReplayError
from .verify import Gradients


class State(Protocol):
    """The state of a reversible scheme: steps that can be taken back. Block k takes it from layer k to layer k + 1."""

    def read(self) -> Tensor: ...  # the next block's input
    def advance(self, k: int, y: Tensor) -> Tensor: ...  # block k gave y: take the step; the next block's input
    def pull(self) -> Tensor: ...  # first half of a step back: the last block's input again
    def push(self) -> None: ...  # undo `pull`
    def retreat(self, k: int, y: Tensor) -> None: ...  # second half: block k gave y on it
    def rewound(self, start: Any) -> bool: ...  # at layer 0: is everything back at its start?
    def free(self) -> None: ...


class Kept:
    """One block's input, kept; to a frame, the same as a tape. `private`: the block writes to it, so every run gets a copy."""

    def __init__(self, x: Tensor, private: bool = False) -> None:
        self.x, self.private, self.version = x, private, x._version

    def recall(self, k: int) -> Tensor:
        if self.x._version != self.version:
            raise ReplayError(
                f"the input of block {k}, kept for its backward pass, was changed in place. Change a copy (x.clone()) instead."
            )
        return self.x.clone() if self.private else self.x.detach()

    def settle(self, k: int, y: Tensor) -> None: ...
    def abandon(self, k: int) -> None: ...


class Tape:
    """The integer state of one forward pass and the calls that led to it. Call −1, if any, made the initial velocity."""

    def __init__(self, state: State, verify: str) -> None:
        self.state, self.verify = state, verify
        self.calls: dict[int, Call] = {}
        self.at = 0
        self.pulled = False
        self.lowest: int | None = None  # the first call that has anything to replay: past it the tape has served
        self.start: Any = None  # what `State.rewound` compares with
        self.gradients: dict[int, Gradients] = {}  # by backward pass
        self.freed = self.broken = False

    def recall(self, k: int) -> Tensor:
        if self.freed:
            raise RuntimeError(
                "The activations of this network were already given up: its backward pass has run once. To run it again, "
                "pass retain_graph=True to the first backward."
            )
        if self.broken:
            raise RuntimeError(
                "An earlier backward pass through this network was interrupted. Run the forward pass again."
            )
        task = torch._C._current_graph_task_id()
        if self.verify != "off" and task not in self.gradients:
            self.gradients = {task: Gradients(p for call in self.calls.values() for p in call.parameters)}
        try:
            if self.at <= k or k < 0:
                self.seek(max(k, 0))
                return self.state.read()
            self.seek(k + 1)
            with self._unbroken():
                x = self.state.pull()
            self.pulled = True
            return x
        except BaseException:
            self._undo_gradients()
            raise

    def settle(self, k: int, y: Tensor) -> None:
        if self.pulled:
            with self._unbroken():
                self.state.retreat(k, y)
            self.pulled, self.at = False, k
        if k == self.lowest:
            self._served()

    def abandon(self, k: int) -> None:
        """The block failed: stand where the state stood before `recall`."""
        if self.pulled:
            self.state.push()
            self.pulled = False
        self._undo_gradients()

    def seek(self, k: int) -> None:
        while self.at > k:
            with self._unbroken():
                x = self.state.pull()
            try:
                y = self.calls[self.at - 1].again(x, [])
            except BaseException:
                self.state.push()
                raise
            with self._unbroken():
                self.state.retreat(self.at - 1, y)
            self.at -= 1
        while self.at < k:
            y = self.calls[self.at].again(self.state.read(), [])
            with self._unbroken():
                self.state.advance(self.at, y)
            self.at += 1

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """A step of the state that stops half-way leaves nothing to go on from."""
        self.broken = True
        yield
        self.broken = False

    def _served(self) -> None:
        if self.verify != "off":
            self.seek(0)
            if not self.state.rewound(self.start):
                self._undo_gradients()
                raise ReplayError(
                    "the network did not rewind to its start: some block, run again in backward, gave another output than "
                    "in forward, so gradients would be wrong; they were put back. verify='blocks' names the block."
                )
        self.gradients = {}
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.state.free()
            self.freed = True

    def _undo_gradients(self) -> None:
        for gradients in self.gradients.values():
            gradients.restore()
        self.gradients = {}


class Frame:
    """One block in the graph: keeps nothing of what autograd wants saved, and finds it again when asked."""

    def __init__(self, call: Call, source: Tape | Kept, k: int) -> None:
        self.call, self.source, self.k = call, source, k
        self.shapes: list[torch.Size] = []
        self.saved: dict[int, Tensor] = {}
        self.running = False  # the block is in its first run

    def run(self, x: Tensor) -> Any:
        self.running = True
        try:
            return self.call.first(x, self.pack, self.unpack)
        finally:
            self.running, self.saved = False, {}

    def pack(self, t: Tensor) -> int:
        self.shapes.append(t.shape)
        return len(self.shapes) - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self.saved:
            self.replay()
        return self.saved.pop(index)

    def replay(self) -> None:
        saved: list[Tensor] = []
        x = self.source.recall(self.k)
        try:
            y = self.call.again(x, saved)
            shapes = [t.shape for t in saved]
            if shapes != self.shapes and not self.running:
                raise ReplayError(
                    f"{self.call.name} did not repeat itself: run again in backward it saved {len(shapes)} tensors for "
                    f"autograd, against {len(self.shapes)} in forward, or tensors of other shapes. Its control flow "
                    "must depend on its input alone; else keep its activations with memory='store'."
                )
        except BaseException:
            self.source.abandon(self.k)
            raise
        if not self.running:  # else the block takes a gradient inside its own forward: the tape is not past it yet
            self.source.settle(self.k, y)
        self.saved = dict(enumerate(saved))
        saved.clear()  # the replay's own graph, if anything keeps it, is not to keep these
