"""The memory of a training step, predicted: the step is run on tensors without values, and every allocation is counted.

    peak = max over t of (bytes alive at time t)        held = the same between forward and backward

both above parameters, gradients and batch, as `measure` reports them. Nothing is computed and nothing is allocated, so the
model may be larger than the machine. What is not seen is what kernels allocate and free inside: workspaces of convolutions
and attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..core.ops import registered
from ..measure.memory import Peak
from ..measure.step import as_call, mean_of_squares


def _nothing(*_: Any) -> bool:
    return True


registered[FakeTensor] = SimpleNamespace(advance_=_nothing, pull_=_nothing, retreat_=_nothing, carry=_nothing)


class Meter(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is on, until the tensor goes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def known(self, tensor: Tensor) -> None:
        """Count this tensor as having been there before."""
        self._count(tensor.untyped_storage(), 0)

    def _count(self, storage: Any, size: int | None = None) -> None:
        key = storage._cdata
        if key in self.alive:
            return
        size = storage.nbytes() if size is None else size

        def gone(_: Any) -> None:
            self.alive.pop(key, None)
            self.now -= size

        self.alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class FusedAttention(TorchFunctionMode):
    """Attention without values takes the path that keeps all weights; on real devices it does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and len(args) == 3 and args[0].dim() == 4:
            return _Fused.apply(*args, kwargs.get("attn_mask"), kwargs.get("enable_gqa", False))
        return func(*args, **kwargs)


def attention_of(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """What calls of attention are to be put into where the model is."""
    return FusedAttention if _device_of(model) == "cpu" else nullcontext


def _device_of(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


class _Fused(torch.autograd.Function):
    """What fused attention keeps and returns."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)  # as the kernels lay it out
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype == torch.bool:
            mask = q.new_empty(mask.shape)  # kept as what is added to the products
        ctx.save_for_backward(q, k, v, out, sums, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


@dataclass
class Prediction:
    """Bytes above parameters, gradients and batch, and how much of `held` came between the ends of each stretch."""

    memory: Peak
    kept: dict[str, int] = field(default_factory=dict)


def predict(
    model: nn.Module, batch: Any, *, loss: Callable[[Any], Tensor] | None = None, autocast: torch.dtype | None = None,
    watch: Mapping[str, tuple[str, str]] | None = None,
) -> Prediction:  # fmt: skip
    """Predict the memory of a training step.

    Args:
        model: the model; it is left as it is.
        batch: its input, as for `measure`; only shapes and dtypes matter.
        loss: from the output to a scalar; None for the mean of squares.
        autocast: the dtype of automatic mixed precision, or None.
        watch: stretches of which to say what their forward pass keeps: names, each with the paths of its first and last module.
    """
    mode = _mode_of(model)
    meter, modules = Meter(), dict(model.named_modules())
    kept: dict[str, int] = dict.fromkeys(watch or {}, 0)
    criterion = loss or mean_of_squares
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(_without_values(model, mode))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(attention_of(model)())
        batch = tree_map(lambda t: _fake(t, mode), batch)
        args, kwargs = as_call(batch)
        for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(batch)):
            if isinstance(tensor, Tensor):
                meter.known(tensor)
                if tensor.grad is not None:
                    meter.known(tensor.grad)
        stack.enter_context(meter)
        for name, (first, last) in (watch or {}).items():
            begun = modules[first].register_forward_pre_hook(lambda *_, n=name: _note(kept, n, -meter.now))
            ended = modules[last].register_forward_hook(lambda *_, n=name: _note(kept, n, meter.now))
            stack.callback(begun.remove)
            stack.callback(ended.remove)
        with torch.autocast(_device_of(model), autocast, enabled=autocast is not None):
            scalar = criterion(model(*args, **kwargs))
        held = meter.now
        torch.autograd.backward(scalar)
        peak = meter.peak
    return Prediction(Peak(peak, held), kept)


def _note(kept: dict[str, int], name: str, amount: int) -> None:
    kept[name] += amount


def _mode_of(model: nn.Module) -> FakeTensorMode:
    for p in model.parameters():
        if isinstance(p, FakeTensor):
            return p.fake_mode
    return FakeTensorMode()


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value


@contextmanager
def _without_values(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Parameters and buffers without values, and gradients of zeros, in the place of the model's own for a while."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (own, dict(own)) for m in model.modules() for own in (m._parameters, m._buffers)
    ]
    try:
        for own, entries in kept:
            own.update({name: _fake(t, mode) for name, t in entries.items()})
        gradients = [(p, p.grad) for p in model.parameters()]
        for p, _ in gradients:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        yield
        for p, gradient in gradients:
            p.grad = gradient
    finally:
        for own, entries in kept:
            own.update(entries)
