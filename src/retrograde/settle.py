"""What is still to be said of passes on an accelerator, which wait for nothing."""

from __future__ import annotations

from torch import nn

from .convert.convert import stages_of
from .errors import RangeOverflow, ReplayError
from .reverse.range import holders


def settle(model: nn.Module) -> None:
    """Raise now what passes of a model have met on an accelerator: overflow, or blocks that did not repeat themselves.

    Waits for the device. The passes that follow would raise it, too; after the last one, and between replays of a CUDA graph, nothing
    else does.

    Args:
        model: a `MomentumNet`, a converted model, or anything that has them in it.

    Raises:
        RangeOverflow: a value left the fixed-point range, or was not finite.
        ReplayError: some block, run again in backward, gave another output, so gradients are wrong.

    >>> import torch, retrograde as rg
    >>> net = rg.MomentumNet([nn.Linear(3, 3) for _ in range(5)])
    >>> net(torch.ones(2, 3)).sum().backward()
    >>> rg.settle(net)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}.")
    errors = list[Exception]()
    for held in (*(part for _, part in holders(model)), *stages_of(model)):
        try:
            held.range.deferred.settle()
        except (RangeOverflow, ReplayError) as error:
            errors.append(error)
    if errors:  # said once: what follows from the first may be in all the others
        raise errors[0]
