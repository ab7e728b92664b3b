"""What a reversible scheme is: how its state moves, and how gradients pass through a step. Everything else is the same for all schemes.

A scheme is one file with a `State` and a `Gradient`:

    momentum    v ← γ·v + (1−γ)·f(x)   x ← x + v
    coupling    two streams, each moved by a function of the other
    residual    x ← x + f(x): γ = 0, which cannot be reversed

The pass (`forward`) drives a state forwards, the tape (`tape`) drives it back, and the autograd nodes (`nodes`) ask its gradient.
docs/extending.md builds a new scheme from nothing.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Gradient(Protocol):
    """The gradient of a step. It holds no part of the state: autograd's graph keeps it until backward."""

    observed: set[int]
    """Layers at whose input somebody looks: there gradients of tokens are given in full."""

    def vjp(
        self, k: int, tokens: list[Tensor | None], float_: Tensor | None, wanted: list[bool]
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Gradients of the tokens and the block's output that went into step k.

        Args:
            k: the step; −1 sets the initial state from an output.
            tokens: gradients of the tokens that came out, None for zero.
            float_: the gradient of the float that came out, which is the next block's input.
            wanted: which tokens need a gradient.
        """
        ...

    def enter(self, tokens: list[Tensor | None], float_: Tensor | None) -> Tensor | None:
        """Gradient of the input."""
        ...

    def leave(self, gradient: Tensor) -> list[Tensor | None]:
        """Gradients of the tokens, from that of what `State.rest` returned."""
        ...


class State(Protocol):
    """The integers of one forward pass. Block k takes them from layer k to layer k + 1."""

    gradient: Gradient
    tokens: int
    """How many tokens carry gradients from step to step. A token has the shape of a part of the state, and no values."""
    entered: int
    """How many of them, the first ones, depend on the input: the others start without a gradient."""

    def token(self) -> Tensor:
        """A new token."""
        ...

    def read(self) -> Tensor:
        """The next block's input, as a float."""
        ...

    def rest(self) -> Tensor:
        """What a network returns besides, or instead: the velocity, or both streams in one."""
        ...

    def advance(self, k: int, y: Tensor) -> Tensor:
        """Block k gave y: take the step; the next block's input. k = −1 sets the initial state and returns the same input."""
        ...

    def pull(self, k: int) -> Tensor:
        """First half of undoing step k: block k's input again."""
        ...

    def retreat(self, k: int, y: Tensor) -> None:
        """Second half: block k gave y on the input that `pull` returned."""
        ...

    def recede(self, k: int, y: Tensor) -> Tensor:
        """`retreat(k, y)`, then `pull(k − 1)`, in one pass over memory where possible."""
        ...

    def hash(self) -> Tensor:
        """By which a rewound state is recognised."""
        ...

    def fork(self) -> State:
        """A copy that goes on alone, forwards only."""
        ...

    def token_of(self, k: int) -> int:
        """Which token goes with the float input of block k."""
        ...

    def free(self) -> None:
        """Let go of every tensor of the state."""
        ...
