"""Residual blocks of PyTorch itself."""

from __future__ import annotations

from torch import nn

from . import KEEPS


def judge(block: nn.Module, owner: type) -> str | None:
    return KEEPS if owner.__name__ in ("TransformerEncoderLayer", "TransformerDecoderLayer") else None
