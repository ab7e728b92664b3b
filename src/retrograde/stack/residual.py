"""Plain residual blocks: γ = 0, and groups of blocks that share one momentum step.

x ← x + f(x)         a block computes f(x) ("branch"), or x + f(x) itself ("block")
x ← relu(x + f(x))   a block computes f(x) ("relu")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call, Extra
from ..core.errors import ReplayError
from ..core.parts import Memo
from ..core.tape import Frame, Kept
from .forward import Like, Look
from .later import Later
from .ledger import Ledger, Noted


def added(x: Tensor, y: Any, form: str) -> Any:
    """The next x, from a block's output."""
    if form == "relu":
        return (x + y).to(y.dtype).relu_()  # the sum has y's dtype, as with the in-place addition that such blocks make
    return y if form == "block" else x + y


class Group(nn.Module):
    """Consecutive blocks as one that computes x + f(x). It holds the blocks without being part of the network's tree."""

    def __init__(self, blocks: Iterable[nn.Module], form: str) -> None:
        super().__init__()
        self.blocks, self.form = nn.ModuleList(blocks), form

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = added(x, block(x, *args, **kwargs), self.form)
        return x


def grouped(blocks: Sequence[nn.Module], every: int, form: str) -> tuple[nn.Module, ...]:
    """The blocks, `every` at a time; the last group may be smaller."""
    if every == 1:
        return tuple(blocks)
    return tuple(Group(blocks[k : k + every], form) for k in range(0, len(blocks), every))


def residual(
    blocks: Iterable[nn.Module], form: str, x: Tensor, extra: Extra, *,
    verify: str, stored_from: int, memo: Memo, later: Later, look: Look | None,
) -> Tensor:  # fmt: skip
    """The residual network itself; blocks before `stored_from` keep their input, the others everything."""
    later.collect(x)
    ledger = (
        Ledger(stored_from, x.device, verify, later)
        if verify != "off" and torch.is_grad_enabled() and stored_from > 0
        else None
    )
    for k, block in enumerate(blocks):
        name, like = f"block {k}", Like(x)
        if torch.is_grad_enabled() and k < stored_from:
            call = Call(block, extra, name, verified=verify == "blocks", memo=memo)
            kept = Kept(x.detach()) if ledger is None else Noted(x.detach(), ledger, k)
            frame = Frame(call, kept, k)
            y = like.checked(frame.run(x, None if look is None else partial(look, k, frame)), name)
            if call.writes:
                raise ReplayError(
                    f"{name} writes to its input, so at gamma = 0 its input cannot be kept. Use memory='store'."
                )
        else:
            y = like.checked(block(x, *extra.args, **extra.kwargs), name)
        x = added(x, y, form)
    return x
