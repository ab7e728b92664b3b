"""A block that takes a gradient inside its own forward: what it has saved so far is made again, as for a replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import ReplayError

if TYPE_CHECKING:
    from .replay import Call


def saved_so_far(call: Call, x: Tensor, version: int, count: int) -> list[Tensor]:
    """The first `count` tensors that the block saves, in the middle of its first run on x, which had this version before."""
    if x._version != version:
        raise ReplayError(
            f"{call.name} writes to its input, and takes a gradient after that. Let it work on a copy, x.clone(), or use "
            "memory='store'."
        )
    saved: list[Tensor] = []
    call.again(x.detach(), saved, count)
    found = list(saved)
    saved.clear()  # NOTE 7 of `replay`
    return found
