"""The coupling scheme: two streams, each moved by a function of the other, in integers.

    forward   v ← v + φ(x)      x ← x + ψ(v)                  [sander2021, eq. 4]
    inverse   x ← x − ψ(v)      v ← v − φ(x)

A block is one half: block 2k is φ_k and moves v, block 2k + 1 is ψ_k and moves x. Each reads the stream it does not
move, so a step back needs no more than that stream, and integer addition is undone exactly: no multiplication, no
buffer. Between two blocks both streams may be rearranged from space to channels, which is a permutation of integers:

    squeeze   (N, C, r·H, r·W) → (N, r²·C, H, W)              the invertible down-sampling of i-RevNets
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .range import PassRange
from .scheme import Gradients, State, check_unchanged, total


@dataclass(frozen=True)
class Recurrence:
    """What one coupling network computes, apart from its blocks."""

    dim: int  # along which the input is split into v and x
    squeezes: tuple[int, ...]  # after each block: the factor r by which both streams are squeezed (1: not at all)


def squeeze(x: Tensor, r: int) -> Tensor:
    """(N, C, r·H, r·W) → (N, r²·C, H, W): every r × r square of pixels becomes r² channels.

    >>> torch.equal(unsqueeze(squeeze(torch.arange(32).view(1, 2, 4, 4), 2), 2).flatten(), torch.arange(32))
    True
    """
    if r == 1:
        return x
    if x.dim() != 4 or x.shape[2] % r or x.shape[3] % r:
        raise ValueError(
            f"a squeeze by {r} needs images (N, C, H, W) with H and W divisible by {r}; got {tuple(x.shape)}. Pad or crop "
            "the images, or use fewer squeezes."
        )
    n, c, h, w = x.shape
    return _fresh(x.reshape(n, c, h // r, r, w // r, r).permute(0, 3, 5, 1, 2, 4).reshape(n, r * r * c, h // r, w // r))


def unsqueeze(x: Tensor, r: int) -> Tensor:
    """(N, r²·C, H, W) → (N, C, r·H, r·W): the inverse of `squeeze`."""
    if r == 1:
        return x
    n, c, h, w = x.shape
    return _fresh(
        x.reshape(n, r, r, c // (r * r), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (r * r), r * h, r * w)
    )


def halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """v and x, the two halves of a network's input."""
    if x.dim() == 0 or not -x.dim() <= dim < x.dim() or x.shape[dim] % 2:
        given = f"{x.shape[dim]} channels" if x.dim() and -x.dim() <= dim < x.dim() else "no such dimension"
        raise ValueError(
            f"a coupling splits its input in two along dim={dim}, so it needs an even number of channels there; got "
            f"{given} in shape {tuple(x.shape)}. Pad a channel, or repeat the input (torch.cat([x, x], dim={dim}))."
        )
    first, second = x.chunk(2, dim)
    return first, second


class CouplingGradient:
    """A half adds to its stream, so its gradient needs no values: gy is the gradient of the moved stream, which passes on."""

    def __init__(self, recurrence: Recurrence, dtype: torch.dtype, shape: torch.Size) -> None:
        self.recurrence = recurrence
        self.dtype = dtype
        self.shape = shape  # of a stream at the start
        self.observed: set[int] = set()
        self.versions: dict[int, int] = {}  # of the gradients that blocks were given: they go on in the same memory

    def vjp(self, k: int, tokens: Gradients, d: Tensor | None, wanted: list[bool]) -> tuple[Gradients, Tensor | None]:
        moved = k % 2
        check_unchanged(tokens[1 - moved], self.versions.pop(k + 1, None))
        gradients = [total(self.dtype, token, d if stream == moved else None) for stream, token in enumerate(tokens)]
        r = self.recurrence.squeezes[k]
        gradients = [None if g is None else unsqueeze(g, r) for g in gradients]
        given = gradients[moved]
        if given is not None:
            self.versions[k] = given._version
        return gradients, given

    def enter(self, tokens: Gradients, d: Tensor | None) -> Tensor | None:
        """Of x₀; the float that enters is the second stream."""
        check_unchanged(tokens[0], self.versions.pop(0, None))
        gv, gx = tokens[0], total(self.dtype, tokens[1], d)
        given = gx if gv is None else gv
        if given is None:
            return None
        both = [given.new_zeros(self.shape) if g is None else g for g in (gv, gx)]
        return torch.cat(both, self.recurrence.dim)

    def leave(self, gradient: Tensor) -> Gradients:
        return list(gradient.to(self.dtype).chunk(2, self.recurrence.dim))


class Coupling(State):
    """The streams v and x of one forward pass; see `scheme`. Both have the same fixed point."""

    names = ("v", "x")
    entered = 2

    def __init__(self, x0: Tensor, recurrence: Recurrence, seen: PassRange) -> None:
        super().__init__(x0, seen)
        self.recurrence = recurrence
        self.at = 0
        v, x = self.begin(*halves(x0, recurrence.dim))
        # a squeeze and its inverse set the strides: have the same from the start
        fresh = _fresh if max(recurrence.squeezes) > 1 else lambda q: q
        self.v = fresh(v)
        self.x = fresh(x)
        self.gradient = CouplingGradient(recurrence, seen.fixed.work, self.x.shape)

    def anew(self, x0: Tensor, seen: PassRange) -> Coupling:
        return Coupling(x0, self.recurrence, seen)

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
        """v and x in one, as the input was."""
        return torch.cat([self.decoded("v"), self.decoded("x")], self.recurrence.dim)

    def take(self, k: int, y: Tensor) -> Tensor:
        """Add block k's output to the stream that it moves, which is the next block's input."""
        moved = self.input_name(k + 1)
        getattr(self, moved).add_(self.integers(y))
        self.note_step(k, y, getattr(self, moved))
        self._rearrange(squeeze, k)
        self.at = k + 1
        return self.decoded(moved)

    def draw(self, k: int, out: Tensor | None) -> None:
        self._rearrange(unsqueeze, k)
        self.at = k
        if out is not None:
            out.set_(self.decoded(self.input_name(k)))  # type: ignore[call-overload] # a squeeze changes its shape

    def undo(self, k: int, y: Tensor, out: Tensor | None) -> None:
        getattr(self, self.input_name(k + 1)).sub_(self.integers(y))
        if out is not None:
            self.draw(k - 1, out)

    def _rearrange(self, how: Callable[[Tensor, int], Tensor], k: int) -> None:
        r = self.recurrence.squeezes[k]
        self.v = how(self.v, r)
        self.x = how(self.x, r)


def _fresh(x: Tensor) -> Tensor:
    """x with the strides of a fresh tensor, also where a size of 1 leaves them open: convolutions choose by strides."""
    return x.clone(memory_format=torch.contiguous_format)
