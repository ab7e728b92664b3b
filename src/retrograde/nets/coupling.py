"""`CouplingNet`: blocks that move two streams by turns, with memory to choose. RevNets and i-RevNets are made of it.

    v ← v + f₀(x)   x ← x + f₁(v)   v ← v + f₂(x)   …      even blocks move v, odd blocks move x
    …   v ← v − f₂(x)   x ← x − f₁(v)   v ← v − f₀(x)      the inverse

The streams are integers (`stack.coupling`), so the inverse is exact, and every memory mode gives the same bits, of
outputs and of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Extra
from ..core.errors import RangeOverflow
from ..core.fixedpoint import FixedPoint, integer_dtype
from ..memory.modes import MODES
from ..stack.aside import copied_buffers, rng_kept
from ..stack.calibrate import Range, apart
from ..stack.coupled import Coupled
from ..stack.coupling import Coupling, Scheme
from ..stack.forward import Like
from ..stack.inputs import check_surroundings
from ..stack.proof import CHOICES as VERIFY
from ..stack.uncompiled import uncompiled
from .inputs import check_input, choice, modules

_SURVEY = FixedPoint(20, torch.int64)  # wide enough for any activations: |x| to 4e12, in steps of 1e-6


@dataclass(frozen=True, eq=False)
class CoupledState:
    """The end of a forward pass: both streams as one float tensor, and the integers from which the start can be recovered."""

    x: Tensor
    streams: tuple[Tensor, Tensor] = field(repr=False)
    start: tuple[int, ...] = field(repr=False)  # checksums of the streams at the start
    scheme: Scheme = field(repr=False)
    fixed: FixedPoint
    grad_mode: bool = field(repr=False)  # blocks may take other kernels without it


class CouplingNet(nn.Module):
    """A stack of blocks, each adding to one stream what it computes from the other.

    Args:
        blocks: modules that map half of the input, and any extra inputs, to a tensor like it: f₀, f₁, …
        dim: the dimension along which the input is split, v before x.
        squeezes: how many pixels a side become channels after each block (1: none), by block.
        memory: "reverse" recovers activations by running backward; "checkpoint" keeps each block's input; "store" keeps
            everything; "auto" takes the cheaper of the first two. The mode never changes a bit of any result.
        fraction_bits: binary digits after the point of the fixed-point state; "auto" calibrates them and keeps watch.
        verify: "auto", "off", "end" or "blocks": as in `MomentumNet`.
        overflow: "raise" if a value leaves the fixed-point range or is not finite; "nan" gives NaN instead.

    Shape:
        x: any floating-point tensor with an even size along `dim`; the output has its shape (squeezed) and dtype.

    >>> net = CouplingNet([nn.Linear(2, 2) for _ in range(6)], memory="reverse")
    >>> state = net.encode(torch.ones(3, 4))
    >>> bool((net.inverse(state) == 1).all())
    True
    """

    def __init__(
        self, blocks: Iterable[nn.Module], *, dim: int = 1, squeezes: Sequence[int] | None = None,
        memory: str = "auto", fraction_bits: int | str = "auto", verify: str = "auto", overflow: str = "raise",
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(modules(blocks))
        factors = (1,) * len(self.blocks) if squeezes is None else tuple(squeezes)
        if len(factors) != len(self.blocks) or not all(isinstance(r, int) and r >= 1 for r in factors):
            raise ValueError(
                f"squeezes must be one whole number from 1 per block, {len(self.blocks)} in all; got {factors}."
            )
        self.scheme = Scheme(dim, factors)
        self.verify = choice("verify", verify, VERIFY)
        self.overflow = choice("overflow", overflow, ("raise", "nan"))
        self.range = Range(fraction_bits)
        self.memory = memory

    @property
    def memory(self) -> str:
        """The memory mode. May be set, between passes."""
        return self._memory

    @memory.setter
    def memory(self, memory: str) -> None:
        self._memory = choice("memory", memory, MODES)

    @property
    def fraction_bits(self) -> int | str:
        """The fraction bits in use, or "auto" before the first pass."""
        fixed = next(iter((self.range.of(self.training).fixed or self.range.fixed).values()), None)
        return self.range.setting if fixed is None else fixed.bits

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Both streams at the end, in one tensor as the input. Extra inputs go to every block."""
        check_input(x)
        return self._run(x, Extra(args, kwargs)).finish()

    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> CoupledState:
        """The final state, from which `inverse` recovers x (as fixed point holds it) bit for bit."""
        check_input(x)
        run = self._run(x, Extra(args, kwargs))
        held = run.state
        start = Coupling(x, self.scheme, held.fixed, overflow="nan").digest()
        v, x1 = (q.clone() for q in held.streams)
        return CoupledState(run.finish(), (v, x1), start, self.scheme, held.fixed, run.tracked)

    @torch.no_grad()
    def inverse(self, state: CoupledState, *args: Any, **kwargs: Any) -> Tensor:
        """x₀ from the final state: the x given to `encode`, to the bit of its fixed-point value."""
        if not isinstance(state, CoupledState) or state.scheme != self.scheme:
            depth = f"{len(state.scheme.squeezes)} blocks" if isinstance(state, CoupledState) else type(state).__name__
            raise ValueError(
                f"this is not a state of this network: {depth}, against {len(self.blocks)} blocks here. Invert what "
                "`encode` of the same network returned."
            )
        held = Coupling(state.x, self.scheme, state.fixed, overflow="nan")
        held.streams, held.at = [q.clone() for q in state.streams], len(self.blocks)
        with copied_buffers(self.modules()):
            for k in reversed(range(len(self.blocks))):
                x = held.pull()
                with torch.set_grad_enabled(state.grad_mode):
                    y = self.blocks[k](x, *args, **kwargs)
                held.retreat(k, Like(x).checked(y, f"block {k}"))
        if not held.rewound(state.start):
            raise ValueError(
                "this state did not rewind to its start. It was encoded with other parameters or other extra inputs, or a "
                "block does not repeat itself (dropout in training mode, say: call .eval() first)."
            )
        return held.both()

    @uncompiled
    def _run(self, x0: Tensor, extra: Extra) -> Coupled:
        """One forward pass."""
        check_surroundings()
        fixed = self.range.of(self.training).for_input(x0, self.scheme.most_guard, lambda: self._survey(x0, extra))
        mode = self._cheapest(x0.dtype) if self.memory == "auto" else self.memory
        try:
            run = self._steps(
                x0, extra, fixed, mode=mode, verify=self.verify, overflow=self.overflow, later=self.range.later
            )
        except RangeOverflow:
            self.range.of(self.training).overflowed()
            raise
        self.range.of(self.training).seen(run.state)  # type: ignore[arg-type] # it has all that is looked at
        return run

    def _steps(self, x0: Tensor, extra: Extra, fixed: FixedPoint, **settings: Any) -> Coupled:
        run = Coupled(x0, self.scheme, fixed, **settings)
        for block in self.blocks:
            run.step(block, extra)
        return run

    @torch.no_grad()
    def _survey(self, x0: Tensor, extra: Extra) -> tuple[float, float]:
        """The largest |x| and |v| of a pass, in a range wide enough for anything, leaving no trace."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # or weights cast here, without gradients, would be found there later
        try:
            with rng_kept(extra.devices(x0), extra.generators), copied_buffers(self.modules()):
                extra = Extra(apart(extra.args), apart(extra.kwargs))
                watch = self._steps(x0, extra, _SURVEY, mode="store", overflow=self.overflow).state.watch
        finally:
            torch.set_autocast_cache_enabled(cached)
        peak = float(watch.nan_to_num(0.0, 0.0).amax()) * 2.0**-_SURVEY.bits
        return peak, peak

    def _cheapest(self, dtype: torch.dtype) -> str:
        """The mode that holds least, per element of the input: both streams once, or half the input per block."""
        return "reverse" if integer_dtype(dtype).itemsize < dtype.itemsize * len(self.blocks) / 2 else "checkpoint"

    def extra_repr(self) -> str:
        return (
            f"depth={len(self.blocks)}, dim={self.scheme.dim}, memory={self.memory!r}, "
            f"fraction_bits={self.fraction_bits!r}, verify={self.verify!r}"
        )
