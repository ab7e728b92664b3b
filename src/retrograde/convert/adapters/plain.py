"""Residual blocks of PyTorch itself."""

from __future__ import annotations

from torch import nn

from . import KEEPS


def judge(block: nn.Module, name: str) -> str | None:
    return KEEPS if name in ("TransformerEncoderLayer", "TransformerDecoderLayer") else None
