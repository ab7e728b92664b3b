"""What a reversible scheme is: integers that move in steps, and gradients that pass through a step. All else is the
same for all schemes.

A scheme is one file with a `State` and a `Gradient`:

    momentum    v ← γ·v + (1−γ)·f(x)   x ← x + v
    coupling    two streams, each moved by a function of the other
    residual    x ← x + f(x): γ = 0, which cannot be reversed

The pass (`forward`) drives a state forwards, the tape (`tape`) drives it back, and the autograd nodes (`nodes`) ask
its gradient. A scheme moves its integers in place. Where a step leaves the range, it is undone and taken again in a
wider one (`widening`). docs/extending.md builds a scheme from nothing.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..arithmetic.fixed import FixedPoint
from ..arithmetic.kernels import KERNELS
from .range import PassRange
from .widening import Widening, pull_before, take_wider

Gradients = list[Tensor | None]
"""Of tokens; None for zero."""


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

    A scheme defines `start`, `take`, `draw` and `undo`, and replaces what else it needs to be different.

    Args:
        x0: the network's input; its dtype is that of every decoded x, its memory layout that of the state.
        recurrence: what the network computes, apart from its blocks, for the scheme itself to read.
        seen: the range of the pass.
        reversible: keep what a step back needs; otherwise only what the next step needs.

    Attributes:
        fixed: the fixed point now.
        buffers: what steps keep besides for the way back, by layer.
        widenings: by step, the ranges that became wider before it.
    """

    names: ClassVar[tuple[str, ...]]
    """The attributes that hold integers."""
    guarded: ClassVar[tuple[str, ...]] = ()
    """Those with guard digits."""
    tokens: ClassVar[int] = 2
    """How many tokens carry gradients from step to step, in an order of the scheme's own. A token has the shape of a part of the
    state, and no values."""
    entered: ClassVar[int] = 1
    """How many of them, the first ones, depend on the input: the others start without a gradient."""
    gradient: Any

    def __init__(self, x0: Tensor, recurrence: Any, seen: PassRange, *, reversible: bool = True) -> None:
        self.recurrence = recurrence
        self.range = seen
        self.reversible = reversible
        self.dtype = x0.dtype
        self.kernels = KERNELS[type(x0), x0.device.type, seen.fixed.dtype]
        self.buffers: dict[int, Tensor] = {}
        self.widenings: dict[int, Widening] = {}
        self.hold(seen.fixed)
        self.start(x0)

    def hold(self, fixed: FixedPoint) -> None:
        """Use this fixed point from now on."""
        self.fixed = fixed
        self.unit = 2.0**-fixed.bits
        self.guarded_unit = 2.0 ** -(fixed.bits + fixed.guard)
        self.range.hold(fixed)

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
        """A new token."""
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

    def launch(self, y: Tensor) -> Tensor:
        """Set the initial state from a block's output; the first block's input."""
        raise NotImplementedError

    def take(self, k: int, y: Tensor) -> Tensor:
        """Take step k in place, and note the largest values in row k + 1 of the range; the next block's input."""
        raise NotImplementedError

    def draw(self, k: int, out: Tensor | None) -> None:
        """First half of undoing step k, in place; with `out`, fill it with the block's input."""
        raise NotImplementedError

    def undo(self, k: int, y: Tensor, out: Tensor | None) -> None:
        """Second half of undoing step k, in place; with `out`, `draw(k − 1, out)` after it."""
        raise NotImplementedError

    def reach(self, k: int, f: float) -> tuple[float, float]:
        """How large x and v may be after step k, for a block's output of at most f."""
        largest = max(float(getattr(self, name).abs().amax()) for name in self.names) * self.unit
        return largest + f, largest + f

    def advance(self, k: int, y: Tensor) -> Tensor:
        """Block k gave y: take the step, in a wider range if need be; the next block's input."""
        out = self.take(k, y)
        if self.range.fits(k + 1):
            return out
        del out  # it is made anew, and may be as much as the step has room for
        return take_wider(self, k, y)

    def pull(self, k: int) -> Tensor:
        """First half of undoing step k: block k's input again. With k = −1, the input of what set the initial state."""
        if k < 0 or k in self.widenings:
            return pull_before(self, k)
        out = self.room()
        self.draw(k, out)
        return out

    def retreat(self, k: int, y: Tensor) -> None:
        """Second half: block k gave y on the input that `pull` returned."""
        self.undo(k, y, None)
        if k in self.widenings:
            self.widenings.pop(k).undo(self)

    def recede(self, k: int, y: Tensor) -> Tensor:
        """`retreat(k, y)`, then `pull(k − 1)`, in one pass over memory where possible."""
        if k in self.widenings or k - 1 in self.widenings:
            self.retreat(k, y)
            return self.pull(k - 1)
        out = self.room()
        self.undo(k, y, out)
        return out

    def room(self) -> Tensor:
        """Room for a float like the integers that blocks read."""
        return torch.empty_like(getattr(self, self.names[0]), dtype=self.dtype)

    def decoded(self, name: str) -> Tensor:
        """Integers as a float."""
        q = getattr(self, name)
        out = torch.empty_like(q, dtype=self.dtype)
        self.kernels.decode(q, self.unit, out)
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
