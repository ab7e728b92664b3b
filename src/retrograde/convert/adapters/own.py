"""Residual blocks of `retrograde.nets`."""

from __future__ import annotations

from torch import nn

from . import without


def judge(block: nn.Module, name: str) -> str | None:
    return without(block, "downsample") if name == "_Block" else None
