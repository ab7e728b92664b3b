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
    """A step that adds to the gradients of the parameters and returns its loss; after a few calls, the replay of a graph of it.

    A graph is for tensors of one shape and layout, that of the first call: others are stepped through without. It is made anew when
    `setting()` changes: what the step depends on besides the parameters, the gradients it adds to and its arguments. Gradients
    must stay where they are: zero them with `set_to_none=False`.

    Args:
        step: forward and backward; its loss, detached.
        parameters: those whose gradients it adds to.
        setting: compared before every call.
        graph: whether to make one at all.
    """

    def __init__(
        self,
        step: Step,
        parameters: Sequence[Tensor],
        setting: Callable[[], Any] = lambda: None,
        graph: bool = True,
    ) -> None:
        self.step, self.parameters, self.setting, self.wanted = step, list(parameters), setting, graph
        self.kind: Any = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.taken, self.graph, self.now, self.loss = 0, None, None, torch.empty(0)
        self.held: tuple[Tensor, ...] = ()
        self.gradients: list[Tensor | None] = []

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.wanted:
            return self.step(x, y)
        kind = [(t.shape, t.stride(), t.dtype) for t in (x, y)]
        self.kind = self.kind or kind
        if kind != self.kind:
            return self.step(x, y)
        if (now := self.setting()) != self.now or not all(map(is_, self.gradients, self._gradients())):
            self.forget()
            self.now = now
        if self.graph is None and self.taken < WARM_UP:
            self.taken += 1
            return self._aside(x, y)
        if self.graph is None:
            self._capture(x, y)
            assert self.graph is not None
        for held, t in zip(self.held, (x, y), strict=True):
            held.copy_(t)
        self.graph.replay()
        return self.loss

    def _gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    def _aside(self, x: Tensor, y: Tensor) -> Tensor:
        """The step on a stream of its own, as a graph will be made of it."""
        side, main = torch.cuda.Stream(x.device), torch.cuda.current_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss = self.step(x, y)
        main.wait_stream(side)
        return loss

    def _capture(self, x: Tensor, y: Tensor) -> None:
        self.held, self.gradients = (x.clone(), y.clone()), self._gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.step(*self.held)
        self.graph = graph
