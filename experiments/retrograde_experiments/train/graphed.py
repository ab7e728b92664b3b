"""Forward and backward as a CUDA graph, for networks of many small kernels, which the host cannot ask for fast enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]
WARM_UP = 3
"""Steps taken one kernel after another before a graph is made: workspaces, the choice of algorithms, ranges."""


class Graphed:
    """Steps that add to the gradients of the parameters and return their loss; after a few of them, replays of a graph of one.

    A graph is for tensors of one shape and layout; others are stepped through without. It is made anew when `setting()` changes: what
    a step depends on besides the parameters, the gradients it adds to and its arguments. Gradients must stay where they are:
    zero them with `set_to_none=False`.

    Args:
        parameters: those whose gradients the steps add to.
        setting: compared before every call.
        graph: whether to make one at all.
    """

    def __init__(
        self, parameters: Sequence[Tensor], setting: Callable[[], Any] = lambda: None, graph: bool = True
    ) -> None:
        self.parameters, self.setting, self.wanted = list(parameters), setting, graph
        self.side: torch.cuda.Stream | None = None  # one: libraries keep workspaces for each
        self.graph: torch.cuda.CUDAGraph | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.taken, self.graph, self.now, self.loss = dict[Any, int](), None, None, torch.empty(0)
        self.held: tuple[Tensor, ...] = ()
        self.gradients: list[Tensor | None] = []

    def __call__(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a step, forward and backward, which in every call must be the same."""
        if not self.wanted:
            return step(x, y)
        if (now := self.setting()) != self.now or not all(map(is_, self.gradients, self._gradients())):
            self.forget()
            self.now = now
        kind = _kind(x, y)
        if self.graph is None:
            taken = self.taken[kind] = self.taken.get(kind, 0) + 1
            if taken <= WARM_UP:
                return self._aside(step, x, y)
            self._capture(step, x, y)
            assert self.graph is not None
        if kind != _kind(*self.held):
            return step(x, y)
        for held, t in zip(self.held, (x, y), strict=True):
            held.copy_(t)
        self.graph.replay()
        return self.loss

    def _gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    def _aside(self, step: Step, x: Tensor, y: Tensor) -> Tensor:
        """The step on the stream on which a graph will be made of it."""
        self.side, main = self.side or torch.cuda.Stream(x.device), torch.cuda.current_stream(x.device)
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            loss = step(x, y)
        main.wait_stream(self.side)
        return loss

    def _capture(self, step: Step, x: Tensor, y: Tensor) -> None:
        self.held, self.gradients, graph = (x.clone(), y.clone()), self._gradients(), torch.cuda.CUDAGraph()
        with torch.cuda.device(x.device), torch.cuda.graph(graph, stream=self.side):
            self.loss = step(*self.held)
        self.graph = graph


def _kind(*tensors: Tensor) -> Any:
    return tuple((t.shape, t.stride(), t.dtype) for t in tensors)
