"""Which of the tensors that a block saves for autograd make its fingerprint, and which elements of them.

What is left out: parameters and buffers (writes to them are seen by their versions), the block's input (the rewound
state or the kept input vouches for it), running statistics and what a block copies of them, and what has no defined
value: bytes in a row and single integers (workspaces, places of generators). A block that contains a random relu in
evaluation, or a CTC loss, has no fingerprint: these save memory that they have not written.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .replay import Call

SAMPLE = 256
"""Elements of each tensor that verify="auto" hashes."""
Picked = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a saved tensor: size and strides of a sample that is spread evenly over it (none: its first elements)."""


class Picker:
    """Tells which of the tensors that a block saves make its fingerprint, one after another as they are saved."""

    def __init__(self, call: Call, x: Tensor) -> None:
        self.device = x.device
        self.undefined = any(_has_undefined(m) for m in call.parts.modules)
        self.statistics = [t for own, _ in call.parts.statistics for t in own.values() if t is not None]
        self.copied = call.parts.instance_norms or any(map(_compiled, (call.block, *call.parts.modules)))
        others = [t for t in (*call.parts.watched, *self.statistics, x) if _plain(t)]
        self.excluded = {t.untyped_storage()._cdata for t in others}
        self.seen: dict[tuple[Any, ...], Any] = {}

    def pick(self, saved: Tensor) -> Picked | None:
        """None: it is left out."""
        t = local(saved)
        if self.undefined or not _plain(t) or t.is_meta or t.is_quantized or undefined(t) or not t.numel():
            return None
        storage = t.untyped_storage()
        if t.device != self.device or not storage.nbytes() or storage._cdata in self.excluded:
            return None  # no bytes: memory that is let go and filled again from outside, as FSDP does with parameters
        where = (t.data_ptr(), t.shape, t.stride())
        if where in self.seen and self.seen[where]() is storage:
            return None  # saved before, and not freed since
        if self.copied and any(_same(t, s) for s in self.statistics):
            return None
        self.seen[where] = ref(storage)
        return ((), ()) if t.is_complex() or t.is_neg() else spread(t)


def spread(t: Tensor, count: int = SAMPLE, apart: int = 1 << 60) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides of a view of some `count` elements, spread evenly over a tensor. No copy of the tensor is made.

    In dense memory they are about so far `apart` at most, at a step that has no factor in common with any size: it meets every row,
    column and channel alike.
    """
    if dense(t):
        step = min(max(t.numel() // count, 1), apart)
        while math.gcd(step, t.numel()) > 1:
            step += 1
        return (-(-t.numel() // step),), (step,)
    each = count ** (1 / sum(n > 1 for n in t.shape))  # elements of each dimension
    steps = [max(int(n // each), 1) for n in t.shape]
    return tuple(-(-n // step) for n, step in zip(t.shape, steps, strict=True)), tuple(
        stride * step for stride, step in zip(t.stride(), steps, strict=True)
    )


def _has_undefined(module: nn.Module) -> bool:
    """Whether a module saves memory that it has not written."""
    return isinstance(module, nn.CTCLoss) or (isinstance(module, nn.RReLU) and not module.training)


def _compiled(module: Any) -> bool:
    """Whether it was compiled: as a module, in place, or as the forward that a converted block is run by."""
    if type(module).__module__.startswith("torch._dynamo") or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether a may be a copy of b: running statistics, which a compiled block and instance norm save, perhaps in 16 bits."""
    return (
        a.is_floating_point()
        and b.is_floating_point()
        and a.dim() <= 1
        and b.dim() <= 1
        and b.numel() > 0
        and a.numel() % b.numel() == 0
    )


def _plain(t: Tensor) -> bool:
    return type(t) in (Tensor, Parameter) and t.layout is torch.strided


def undefined(t: Tensor) -> bool:
    """Whether it may be a library's: bytes in a row, or the place of a generator, which attention without dropout leaves undefined."""
    if t.dtype.is_floating_point:
        return False
    return (
        t.dtype == torch.uint64
        or (t.dtype == torch.uint8 and t.dim() == 1)
        or (t.dtype == torch.int64 and t.dim() == 0)
    )


def dense(t: Tensor) -> bool:
    """Whether it lies in memory without gaps."""
    if t.is_contiguous():
        return True
    return t.numel() == 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))


def local(t: Tensor) -> Tensor:
    """What is here of a tensor that is in pieces on several devices; else itself."""
    return t if type(t) is Tensor else getattr(t, "_local_tensor", t)
