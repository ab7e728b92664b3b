"""The state of a two-stream coupling as integers, one half-step on and one back.

    forward   v ← v + φ(x)      x ← x + ψ(v)                  [sander2021, eq. 4]
    inverse   x ← x − ψ(v)      v ← v − φ(x)

A block is one half: block 2k is φ_k and moves v, block 2k + 1 is ψ_k and moves x. Each reads the stream it does not
move, so a step back needs no more than that stream, and integer addition is undone exactly: no multiplication, no
buffer. Between two blocks both streams may be rearranged from space to channels, which is a permutation of integers:

    squeeze   (N, C, r·H, r·W) → (N, r²·C, H, W)              the invertible down-sampling of i-RevNets
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import RangeOverflow
from ..core.fixedpoint import FixedPoint
from ..core.verify import checksum, digest
from .momentum import Outcome


@dataclass(frozen=True)
class Scheme:
    """What one coupling network computes, apart from its blocks."""

    dim: int  # along which the input is split into v and x
    squeezes: tuple[int, ...]  # after each block: the factor r by which both streams are squeezed (1: not at all)
    most_guard: int = 0  # both streams have the same digits


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
    return _plain(x.reshape(n, c, h // r, r, w // r, r).permute(0, 3, 5, 1, 2, 4).reshape(n, r * r * c, h // r, w // r))


def unsqueeze(x: Tensor, r: int) -> Tensor:
    """(N, r²·C, H, W) → (N, C, r·H, r·W): the inverse of `squeeze`."""
    if r == 1:
        return x
    n, c, h, w = x.shape
    return _plain(
        x.reshape(n, r, r, c // (r * r), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (r * r), r * h, r * w)
    )


def _plain(x: Tensor) -> Tensor:
    """x with the strides of a fresh tensor, also where a size of 1 leaves them open: convolutions choose by strides."""
    return x.clone(memory_format=torch.contiguous_format)


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


class Coupling:
    """The streams v and x of one forward pass; a `core.tape.State`.

    Args:
        x0: the network's input, both streams in one.
        overflow: "raise" at the step that leaves the range (on an accelerator: later, without waiting for the device), or
            "nan": leave it to the caller to look at `watch`.
    """

    def __init__(self, x0: Tensor, scheme: Scheme, fixed: FixedPoint, *, overflow: str) -> None:
        self.scheme, self.fixed, self.dtype, self.at = scheme, fixed, x0.dtype, 0
        self.raises = overflow == "raise"
        self.eager = self.raises and x0.device.type == "cpu"
        largest = torch.finfo(x0.dtype).max * 2.0**fixed.bits if fixed.bits < 900 else fixed.limit
        limit = min(fixed.limit, largest)
        self.limits = (limit, limit)  # of either stream, as integers; it must fit its float
        # one row per block, after one for the start; both columns the same, as the two streams share one range
        self.watch = torch.zeros(len(scheme.squeezes) + 1, 2, dtype=torch.float32, device=x0.device)
        self.blank = torch.zeros((), dtype=fixed.work, device=x0.device)
        scaled = [half.detach().to(fixed.work) * 2.0**fixed.bits for half in halves(x0, scheme.dim)]
        self._look(0, *scaled)
        self.streams = [torch.round(half).to(fixed.dtype) for half in scaled]
        if max(scheme.squeezes) > 1:  # a squeeze and its inverse set the strides: have the same from the start
            self.streams = [_plain(q) for q in self.streams]

    def token(self) -> Tensor:
        """A stand-in of a stream's shape that carries gradients and holds no values."""
        return self.blank.expand(self.streams[0].shape)

    def read(self) -> Tensor:
        """The next block's input: x for φ, v for ψ."""
        return self._float(1 - self.at % 2)

    def both(self) -> Tensor:
        """v and x in one, as the input was."""
        return torch.cat([self._float(0), self._float(1)], self.scheme.dim)

    def advance(self, k: int, y: Tensor) -> Tensor:
        """Add block k's output to the stream that it moves; the next block's input, which is that stream."""
        moved, step = self.streams[k % 2], self._step(y)
        moved.add_(step.to(moved.dtype))
        self._look(k + 1, step, moved)
        self.streams = [squeeze(q, self.scheme.squeezes[k]) for q in self.streams]
        self.at = k + 1
        return self._float(k % 2)

    def pull(self) -> Tensor:
        """First half of a step back: undo the squeeze; the last block's input again."""
        self.streams = [unsqueeze(q, self.scheme.squeezes[self.at - 1]) for q in self.streams]
        return self._float(self.at % 2)

    def push(self) -> None:
        """Undo `pull`."""
        self.streams = [squeeze(q, self.scheme.squeezes[self.at - 1]) for q in self.streams]

    def retreat(self, k: int, y: Tensor) -> None:
        """Second half of a step back: subtract what block k gave."""
        moved = self.streams[k % 2]
        moved.sub_(self._step(y).to(moved.dtype))
        self.at = k

    def recede(self, k: int, y: Tensor) -> Tensor:
        """`retreat`, then `pull`."""
        self.retreat(k, y)
        return self.pull()

    def mark(self) -> Tensor:
        """A hash of both streams."""
        return digest(self.streams[1], digest(self.streams[0]), 1)

    def digest(self) -> tuple[int, ...]:
        """A checksum of each stream."""
        return tuple(map(checksum, self.streams))

    def rewound(self, start: tuple[int, ...]) -> bool:
        """At layer 0: whether both streams are what they were, going by their checksums then."""
        return self.digest() == start

    @property
    def recurrence(self) -> Scheme:
        return self.scheme

    def outcome(self) -> Outcome:
        return Outcome(self.scheme, self.fixed, self.limits, self.raises)  # type: ignore[arg-type] # it has most_guard

    def free(self) -> None:
        """Let go of every tensor of the state."""
        del self.streams

    def _float(self, stream: int) -> Tensor:
        return self.fixed.decode(self.streams[stream], self.dtype)

    def _step(self, y: Tensor) -> Tensor:
        return torch.round(y.detach().to(self.fixed.work) * 2.0**self.fixed.bits)

    def _look(self, row: int, *values: Tensor) -> None:
        """Note the largest magnitude; what is NaN stays NaN."""
        ends = [end.to(self.fixed.work).abs() for v in values if v.numel() for end in torch.aminmax(v)]
        if ends:
            self.watch[row] = torch.stack(ends).amax().float()
        if self.eager:
            self._check(row, float(self.watch[row, 0]))

    def _check(self, row: int, value: float) -> None:
        """Raise if the largest magnitude after a block (row 0: of the input) is out of range or not finite."""
        limit, source = self.limits[0], f"out of block {row - 1}" if row else "in the input"
        if value <= limit:
            return
        if not value < float("inf"):
            raise RangeOverflow(
                f"NaN or Inf {source}. Nothing was kept; find where it comes from, or pass overflow='nan' to let it through."
            )
        unit = 2.0**-self.fixed.bits
        raise RangeOverflow(
            f"a stream reaches {value * unit:.4g} {source}, beyond {limit * unit:.4g}, the range of fraction_bits="
            f"{self.fixed.bits}. Pass fewer fraction_bits (with 'auto' the next call calibrates anew), or look for activations "
            "that grow without bound."
        )
