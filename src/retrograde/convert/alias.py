"""Whether a tensor is another one, untouched: the same memory, and the same gradient.

Hooks of modules and FSDP2 hand on aliases. One that leads its gradient elsewhere, or changes it on the way, is a tensor of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

FSDP2 = {"RegisterPostBackwardFunctionBackward"}
HOOKED = "BackwardHookFunctionBackward"  # register_full_backward_hook
_IDENTITIES = FSDP2 | {"AddedBackward", HOOKED, "AliasBackward0", "ViewBackward0"}
"""Nodes of autograd's graph that hand on a tensor and its gradient as they are (that of `branch`: by way of another)."""


def version(x: Tensor) -> int:
    """How often x was written to; of tensors of inference mode that is not counted."""
    return 0 if x.is_inference() else x._version


def same(x: Tensor, mine: Tensor, at: int) -> bool:
    """Whether x is `mine` as it was at that version, in value and gradient."""
    if version(x) != at:
        return False
    if x is mine or not _alias(x, mine):
        return x is mine
    return handed_on(x, mine) is not None if mine.requires_grad else not x.requires_grad


def handed_on(x: Tensor, mine: Tensor) -> set[str] | None:
    """The nodes through which the gradient of x goes on its way to `mine`; None if any of them may change it, or leads elsewhere."""
    node: Any = x.grad_fn
    place, passed = x.output_nr, set[str]()
    while node is not None and node is not mine.grad_fn:
        if getattr(node, "variable", None) is mine:  # a leaf
            return passed
        nexts = node.next_functions
        if node.name() not in _IDENTITIES or not 0 <= place < len(nexts):
            return None
        passed.add(node.name())
        node, place = nexts[place]
    return passed if node is not None and place == mine.output_nr else None


def _alias(x: Tensor, mine: Tensor) -> bool:
    return (
        x.data_ptr() == mine.data_ptr()
        and x.shape == mine.shape
        and x.stride() == mine.stride()
        and x.dtype == mine.dtype
        and x.untyped_storage()._cdata == mine.untyped_storage()._cdata
    )
