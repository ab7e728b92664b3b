"""Residual blocks of `retrograde.nets`."""

from __future__ import annotations

from torch import nn

from . import without


def judge(block: nn.Module, owner: type) -> str | None:
    return without(block, "downsample") if owner.__name__ == "_Block" else None
