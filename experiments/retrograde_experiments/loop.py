"""The steps of a training that can be killed at any moment: what dynamics, rings, lista and the others share.

curve = []
for step in steps(context, 1000, {"net": net, "optimizer": optimizer}, {"curve": curve}):
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .checkpoint import restore, state_of
from .run import Context


def steps(context: Context, total: int, parts: dict[str, Any], curves: dict[str, list[Any]]) -> Iterator[int]:
    """The numbers of the steps that are left, after what a checkpoint holds has been put back.

    Args:
        context: of the unit: its checkpoint is loaded, and written before a step where one is due.
        total: steps of the whole training.
        parts: networks, and others with `state_dict` and `load_state_dict`, by name.
        curves: lists that the training adds to. What was in them at the last checkpoint is put back.
    """
    state = context.checkpoint.load(context.device)
    first = 0
    if state is not None:
        first = state["step"]
        for name, part in parts.items():
            restore(part, state[name]) if isinstance(part, nn.Module) else part.load_state_dict(state[name])
        for name, curve in curves.items():
            curve[:] = state[name]
    context.progress.steps(total, first)
    for step in range(first, total):
        if context.checkpoint.due():
            kept = {n: state_of(p) if isinstance(p, nn.Module) else p.state_dict() for n, p in parts.items()}
            context.checkpoint.save({"step": step, **kept, **curves})
        yield step
        context.progress.step()
