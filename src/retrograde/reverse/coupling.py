"""The coupling scheme: two streams, each moved by a function of the other, in integers.

    forward   v ← v + φ(x)      x ← x + ψ(v)                  [sander2021, eq. 4]
    inverse   x ← x − ψ(v)      v ← v − φ(x)

A block is one half: block 2k is φ_k and moves v, block 2k + 1 is ψ_k and moves x. Each reads the stream it does not
move, so a step back needs no more than that stream, and integer addition is undone exactly: no multiplication, no
buffer. Between two blocks both streams may be squeezed from space to channels (`arithmetic.squeeze`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arithmetic.squeeze import fresh, squeeze, unsqueeze
from .scheme import Gradient, Gradients, State, total


@dataclass(frozen=True)
class Recurrence:
    """What one coupling network computes, apart from its blocks."""

    dim: int  # along which the input is split into v and x
    squeezes: tuple[int, ...]  # after each block: the factor r by which both streams are squeezed (1: not at all)

    def __str__(self) -> str:
        return f"{len(self.squeezes)} blocks"


class CouplingGradient(Gradient):
    """A half adds to its stream, so its gradient needs no values: gy is the gradient of the moved stream, which passes on."""

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        moved, r = k % 2, self.recurrence.squeezes[k]
        gradients = [total(self.dtype, token, d if stream == moved else None) for stream, token in enumerate(tokens)]
        gradients = [None if g is None else unsqueeze(g, r) for g in gradients]
        return gradients, gradients[moved]

    def enter(self, tokens: Gradients, d: Tensor | None) -> Tensor | None:
        """Of x₀; the float that enters is the second stream."""
        both = [tokens[0], total(self.dtype, tokens[1], d)]
        zero = next((torch.zeros_like(g) for g in both if g is not None), None)
        return None if zero is None else torch.cat([zero if g is None else g for g in both], self.recurrence.dim)

    def leave(self, gradient: Tensor) -> Gradients:
        return list(gradient.to(self.dtype).chunk(2, self.recurrence.dim))


class Coupling(State):
    """The streams v and x of one forward pass; see `scheme`. Both have the same fixed point."""

    names = ("v", "x")
    entered = 2
    recurrence: Recurrence

    def start(self, x0: Tensor) -> None:
        self.at = 0
        self.v, self.x = self.begin(*x0.chunk(2, self.recurrence.dim))
        if max(self.recurrence.squeezes) > 1:  # a squeeze and its inverse set the strides: have the same from the start
            self.v, self.x = fresh(self.v), fresh(self.x)
        self.gradient = CouplingGradient(self.fixed.work, self.recurrence)

    def token(self) -> Tensor:
        return self.blank.new_zeros(()).expand(self.x.shape)

    def token_of(self, k: int) -> int:
        return 1 - k % 2

    def input_name(self, k: int) -> str:
        return "v" if k % 2 else "x"

    def read(self) -> Tensor:
        """The next block's input: x for φ, v for ψ."""
        return self.decoded(self.input_name(self.at))

    def rest(self) -> Tensor:
        return torch.cat([self.decoded("v"), self.decoded("x")], self.recurrence.dim)

    def take(self, k: int, y: Tensor) -> Tensor:
        """Add block k's output to the stream that it moves, which is the next block's input."""
        moved = getattr(self, self.input_name(k + 1)).add_(self.integers(y))
        self.note_step(k, y, moved)
        r = self.recurrence.squeezes[k]
        self.v, self.x = squeeze(self.v, r), squeeze(self.x, r)
        self.at = k + 1
        return self.read()

    def draw(self, k: int) -> Tensor:
        r = self.recurrence.squeezes[k]
        self.v, self.x = unsqueeze(self.v, r), unsqueeze(self.x, r)
        self.at = k
        return self.read()

    def undo(self, k: int, y: Tensor, further: bool) -> Tensor | None:
        getattr(self, self.input_name(k + 1)).sub_(self.integers(y))
        return self.draw(k - 1) if further else None
