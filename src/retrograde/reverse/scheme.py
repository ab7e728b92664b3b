"""What a reversible scheme is: integers that move in steps, and gradients that pass through a step. All else is the
same for all schemes.

A scheme is one file with a `State` and, where it is more than a few lines, its `Gradient` beside it: `momentum` has
v ← γ·v + (1−γ)·f(x), x ← x + v; `coupling` has two streams, each moved by a function of the other.

The pass (`forward`) drives a state forwards and asks its gradient, the tape (`tape`) drives it back. A scheme moves its
integers in place. Where a step leaves the range, it is undone and taken again in a wider one (`widening`).
docs/extending.md builds a scheme from nothing.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch._subclasses import FakeTensor

from ..arithmetic.kernels import KERNELS
from .range import PassRange
from .widening import Widening, pull_before, take_wider

Gradients = list[Tensor | None]  # of tokens; None for zero


def total(dtype: torch.dtype, *gradients: Tensor | None) -> Tensor | None:
    """The sum of gradients, in this dtype."""
    given = [g.to(dtype) for g in gradients if g is not None]
    return sum(given[1:], start=given[0]) if given else None


def laid_out(t: Tensor, strides: tuple[int, ...], work: torch.dtype = torch.float64) -> Tensor:
    """t as the kernels take it: in this memory layout; not a subclass that may hold its values elsewhere (a collective under way);
    not wider than `work`."""
    if type(t) is not Tensor and not isinstance(t, FakeTensor):
        t = t.detach().clone()
    if t.dtype == torch.float64 and work == torch.float32:
        t = t.float()
    return t if t.stride() == strides else t.new_empty_strided(t.shape, strides).copy_(t)


def traced(*gradients: Tensor | None) -> bool:
    """Whether the backward pass is itself differentiated or vectorised, so that nothing may be done in place."""
    return torch.is_grad_enabled() or any(
        g is not None and (is_batchedtensor(g) or is_legacy_batchedtensor(g)) for g in gradients
    )


def keeps_graph() -> bool:
    """Whether the graph may be run through again after this backward pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class Gradient:
    """How gradients pass through a step. It holds no part of the state: autograd's graph keeps it until backward.

    Attributes:
        dtype: in which gradients are added up.
        recurrence: as of the state.
        observed: layers at whose input somebody looks: there the gradient of a token must not be left out.
        given: by layer, the tokens whose gradient is the very tensor that the block was given, and its version then.
    """

    def __init__(self, dtype: torch.dtype, recurrence: Any = None) -> None:
        self.dtype = dtype
        self.recurrence = recurrence
        self.observed: set[int] = set()
        self.given: dict[int, list[tuple[int, int]]] = {}

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        """Gradients of the tokens and of the block's output that went into step k; −1 sets the initial state from an output.

        Args:
            tokens: gradients of the tokens that came out.
            d: the gradient of the float that came out, which is the next block's input.
            wanted: which tokens need a gradient.
        """
        raise NotImplementedError

    def enter(self, tokens: Gradients, d: Tensor | None) -> Tensor | None:
        """Gradient of the network's input."""
        return total(self.dtype, *tokens, d)

    def leave(self, gradient: Tensor) -> Gradients:
        """Gradients of the tokens, from that of what `State.rest` returned."""
        raise NotImplementedError


class State:
    """The integers of one forward pass, each in a tensor of its own. Block k takes them from layer k to layer k + 1.

    A scheme defines `names`, `start`, `take`, `draw`, `undo` and `rest`; the folder's `__init__` has what each must do.

    Args:
        x0: the network's input; its dtype is that of every decoded x, its memory layout that of the state.
        recurrence: what the network computes, apart from its blocks, for the scheme itself to read.
        seen: the range of the pass.
        reversible: keep what a step back needs; otherwise only what the next step needs.
    """

    names: ClassVar[tuple[str, ...]]  # the attributes that hold integers
    guarded: ClassVar[tuple[str, ...]] = ()  # those of them with guard digits
    tokens: ClassVar[int] = 2  # how many carry gradients from step to step, in an order of the scheme's own
    entered: ClassVar[int] = 1  # how many, the first ones, depend on the input: the others start without a gradient
    gradient: Any

    def __init__(self, x0: Tensor, recurrence: Any, seen: PassRange, *, reversible: bool = True) -> None:
        self.recurrence = recurrence
        self.range = seen
        self.reversible = reversible
        self.dtype = x0.dtype
        self.kernels = KERNELS[type(x0), x0.device.type, seen.fixed.dtype]
        self.buffers: dict[int, Tensor] = {}  # what steps keep besides for the way back, by layer
        self.widenings: dict[int, Widening] = {}  # by step, the ranges that became wider before it
        self.fixed = seen.fixed  # the fixed point now
        self.start(x0)

    def start(self, x0: Tensor) -> None:
        """Set the integers, with `begin`, and the `gradient`."""
        raise NotImplementedError

    def begin(self, *parts: Tensor) -> list[Tensor]:
        """The parts of the input as integers, noted as the start of the pass."""
        self.blank = torch.zeros((), dtype=self.fixed.work, device=parts[0].device).expand(parts[0].shape)
        found = [torch.empty_like(part.detach(), dtype=self.fixed.dtype) for part in parts]
        for part, q in zip(parts, found, strict=True):
            self.encode(part, q, column=1)
        return found

    def encode(self, x: Tensor, q: Tensor, column: int, guard: int = 0) -> None:
        """Fill q with x as integers, and note the largest in a column of the range's first row."""
        x = laid_out(x.detach(), q.stride(), self.fixed.work)
        self.kernels.encode(x, 2.0 ** (self.fixed.bits + guard), q, self.range.rows[0], column)
        if not self.range.fits(0):
            self.range.refuse(0)

    def integers(self, y: Tensor) -> Tensor:
        """A block's output as integers. 0 where it is NaN or beyond them, so that it can be taken off again even then."""
        step = torch.round(y.detach().to(self.fixed.work) * 2.0**self.fixed.bits)
        return torch.where(step.abs() <= self.fixed.limit, step, 0).to(self.fixed.dtype)

    def note_step(self, k: int, y: Tensor, moved: Tensor) -> None:
        """Note in the range the largest magnitudes of the block's output and of what step k has made of a tensor of integers."""
        values = (y.detach().to(self.fixed.work) * 2.0**self.fixed.bits, moved)
        ends = [end.to(self.fixed.work).abs() for v in values if v.numel() for end in torch.aminmax(v)]
        if ends:
            self.range.rows[k + 1].copy_(torch.stack(ends).amax())  # NaN stays NaN

    def token(self) -> Tensor:
        """A new token: it has the shape of a part of the state, and no values."""
        return self.blank.detach()

    def token_of(self, k: int) -> int:
        """Which token goes with the float input of block k."""
        return 0

    def input_name(self, k: int) -> str:
        """Which of the integers block k reads."""
        return "x"

    def read(self) -> Tensor:
        """The next block's input, as a float."""
        return self.decoded("x")

    def rest(self) -> Tensor:
        """What a network returns besides x, or instead: the velocity, or both streams in one."""
        raise NotImplementedError

    def take(self, k: int, y: Tensor) -> Tensor:
        """Take step k in place, and note the largest values in row k + 1 of the range. Returns the next block's input."""
        raise NotImplementedError

    def draw(self, k: int) -> Tensor:
        """Undo the first half of step k, in place. Returns block k's input."""
        raise NotImplementedError

    def undo(self, k: int, y: Tensor, further: bool) -> Tensor | None:
        """Undo the second half of step k, in place. `further`: then `draw(k − 1)`; returns its result."""
        raise NotImplementedError

    def reach(self, k: int, f: float) -> tuple[float, float]:
        """How large x and v may be after step k, for a block's output of at most f."""
        largest = max(float(getattr(self, name).abs().amax()) for name in self.names) * self.fixed.unit
        return largest + f, largest + f

    def advance(self, k: int, y: Tensor) -> Tensor:
        """Block k gave y: take the step, in a wider range if need be. Returns the next block's input."""
        out = self.take(k, y)
        if self.range.fits(k + 1):
            return out
        del out  # it is made anew, and may be as much as the step has room for
        return take_wider(self, k, y)

    def pull(self, k: int) -> Tensor:
        """Undo the first half of step k. Returns block k's input; with k = −1, that of what set the initial state."""
        return pull_before(self, k) if k < 0 or k in self.widenings else self.draw(k)

    def retreat(self, k: int, y: Tensor) -> None:
        """Second half: block k gave y on the input that `pull` returned."""
        self.undo(k, y, False)
        if k in self.widenings:
            self.widenings.pop(k).undo(self)

    def recede(self, k: int, y: Tensor) -> Tensor:
        """`retreat(k, y)`, then `pull(k − 1)`, in one pass over memory where possible. Returns what `pull` does."""
        if k in self.widenings or k - 1 in self.widenings:
            self.retreat(k, y)
            return self.pull(k - 1)
        x = self.undo(k, y, True)
        assert x is not None
        return x

    def decoded(self, name: str) -> Tensor:
        """Integers as a float."""
        q = getattr(self, name)
        out = torch.empty_like(q, dtype=self.dtype)
        self.kernels.decode(q, self.fixed.unit, out)
        return out

    def hash(self) -> Tensor:
        """By which a rewound state is recognised."""
        found = torch.zeros((), dtype=torch.int64, device=self.blank.device)
        for seed, name in enumerate(self.names):
            self.kernels.digest(getattr(self, name), found, seed, 1)
        return found

    def anew(self, x0: Tensor, seen: PassRange) -> Any:
        """A state like this one at the start of its pass, in another range."""
        return type(self)(x0, self.recurrence, seen, reversible=self.reversible)

    def copy(self, *, reversible: bool = True) -> Any:
        """A copy that can be moved alone; if not `reversible`, forwards only."""
        other = copy.copy(self)
        other.reversible = self.reversible and reversible
        for name in self.names:
            setattr(other, name, getattr(self, name).clone())
        kept = self.buffers if other.reversible else sorted(self.buffers)[-1:]
        other.buffers = {at: self.buffers[at].clone() for at in kept}
        other.range = copy.copy(self.range)
        other.widenings = dict(self.widenings)
        return other

    def free(self) -> None:
        """Let go of every tensor of the state."""
        self.buffers = {}
        self.widenings = {}
        for name in self.names:
            delattr(self, name)
