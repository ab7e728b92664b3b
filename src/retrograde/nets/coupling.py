"""`CouplingNet`: blocks that move two streams by turns, with memory to choose. RevNets and i-RevNets are made of it.

    v ← v + f₀(x)   x ← x + f₁(v)   v ← v + f₂(x)   …      even blocks move v, odd blocks move x
    …   v ← v − f₂(x)   x ← x − f₁(v)   v ← v − f₀(x)      the inverse

The streams are integers (`reverse.coupling`), so the inverse is exact, and every memory mode gives the same bits, of
outputs and of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic.fixed import FixedPoint, integer_dtype
from ..memory.modes import MODES
from ..reverse.checks import CHOICES as VERIFY
from ..reverse.coupling import Coupling, Recurrence
from ..reverse.extra import Extra
from ..reverse.forward import Pass
from ..reverse.parts import Memo
from ..reverse.range import Range
from .checks import Choice, check_halves, modules
from .inverse import CoupledState, rewound


class CouplingNet(nn.Module):
    """A stack of blocks, each adding to one stream what it computes from the other.

    Args:
        blocks: modules that map half of the input, and any extra inputs, to a tensor like it: f₀, f₁, …
        dim: the dimension along which the input is split, v before x.
        squeezes: how many pixels a side become channels after each block (1: none), by block.
        memory: "reverse", "checkpoint", "store" or "auto": as in `MomentumNet`.
        fixed_point, verify, overflow: as in `MomentumNet`.

    Shape:
        x: any floating-point tensor with an even size along `dim`; the output has its shape (squeezed) and dtype.

    >>> net = CouplingNet([nn.Linear(2, 2) for _ in range(6)], memory="reverse")
    >>> state = net.encode(torch.ones(3, 4))
    >>> bool((net.inverse(state) == 1).all())
    True
    """

    memory: Any = Choice("what is kept for backward", MODES)
    verify: Any = Choice("what is compared in backward", VERIFY)
    overflow: Any = Choice("what happens where a value is not finite", ("raise", "nan"))

    def __init__(
        self, blocks: Iterable[nn.Module], *, dim: int = 1, squeezes: Sequence[int] | None = None,
        memory: str = "auto", fixed_point: str | FixedPoint = "auto", verify: str = "auto", overflow: str = "raise",
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(modules(blocks))
        factors = (1,) * len(self.blocks) if squeezes is None else tuple(squeezes)
        if len(factors) != len(self.blocks) or not all(isinstance(r, int) and r >= 1 for r in factors):
            raise ValueError(
                f"squeezes must be one whole number from 1 per block, {len(self.blocks)} in all; got {factors}."
            )
        self.recurrence = Recurrence(dim, factors)
        self.verify = verify
        self.overflow = overflow
        self.range = Range(fixed_point)
        self.memo = Memo()
        self.memory = memory

    @property
    def fixed_point(self) -> FixedPoint | str:
        """The fixed point in use, or the setting before the first pass."""
        return self.range.now

    @torch._disable_dynamo
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Both streams at the end, in one tensor as the input. Extra inputs go to every block."""
        return self._run(x, Extra(args, kwargs)).rest()

    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> CoupledState:
        """The final state, from which `inverse` recovers x (as fixed point holds it) bit for bit."""
        run = self._run(x, Extra(args, kwargs), encoding=True)
        held = run.state.copy()
        return CoupledState(x=run.rest(), fixed=held.fixed, held=held, start=run.start, grad_mode=run.tracked)

    def inverse(self, state: CoupledState, *args: Any, **kwargs: Any) -> Tensor:
        """x₀ from the final state: the x given to `encode`, to the bit of its fixed-point value."""
        x0: Tensor = rewound(self, state, list(self.blocks), Extra(args, kwargs)).rest()
        return x0

    def _run(self, x0: Tensor, extra: Extra, encoding: bool = False) -> Pass:
        """One forward pass. `encoding`: its start is to be known again."""
        depth = len(self.blocks)
        seen = self.range.begin(
            x0, depth + 1, training=self.training, overflow=self.overflow, most_guard=0, stepwise=encoding
        )
        check_halves(x0, self.recurrence.dim)
        mode = self._cheapest(x0.dtype) if self.memory == "auto" else self.memory
        state = Coupling(x0, self.recurrence, seen)
        run = Pass(
            state, x0, depth, reversed=depth * (mode == "reverse"), kept=depth * (mode == "checkpoint"), verify=self.verify,
            memo=self.memo, deferred=self.range.deferred,
        )  # fmt: skip
        if encoding:
            run.start = state.hash()
        for block in self.blocks:
            run.step(block, extra)
        run.look_back()
        self.range.learn(run.state.range)
        return run

    def _cheapest(self, dtype: torch.dtype) -> str:
        """The mode that holds least, per element of the input: both streams once, or half the input per block."""
        return "reverse" if integer_dtype(dtype).itemsize < dtype.itemsize * len(self.blocks) / 2 else "checkpoint"

    def extra_repr(self) -> str:
        return (
            f"depth={len(self.blocks)}, dim={self.recurrence.dim}, memory={self.memory!r}, "
            f"fixed_point={self.fixed_point!r}, verify={self.verify!r}"
        )
