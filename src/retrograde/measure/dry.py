"""A training step on tensors without values: nothing is computed or allocated, and every allocation is counted.

    usage = the most bytes alive in each interval between two marks

What kernels allocate and free inside is not seen. Some of it is known well enough to be added (`workspace`).
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..core.ops import registered


def _nothing(*_: Any) -> bool:
    return True


def _step(x: Tensor, v: Tensor, i: Any, y: Tensor, *others: Any) -> None:
    """What the CPU bodies make for a moment: y in float32."""
    if y.device.type == "cpu" and y.dtype.itemsize < 4:
        y.float()


def _encode(x: Tensor, *others: Any) -> bool:
    """Whether the tensor's device has a kernel for it, which makes nothing else."""
    return hasattr(registered.get(x.device.type), "encode") and x.dtype != torch.float64


def _decode(q: Tensor, *others: Any) -> bool:
    """As `_encode`."""
    return hasattr(registered.get(q.device.type), "decode") and q.dtype != torch.int64


_BODIES = {
    "advance_": _step, "pull_": _nothing, "retreat_": _step, "carry": _nothing, "encode": _encode, "decode": _decode,
}  # fmt: skip
registered[FakeTensor] = SimpleNamespace(**_BODIES)


class Meter(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is on, until the tensor goes; `mark` begins a new interval."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.most = 0  # at any time; since the last mark
        self.alive: dict[int, weakref.ref[Any]] = {}
        self.before: set[int] = set()  # what was there before
        self.cast = 0  # bytes of parameters in another dtype made so far
        self.leaves: list[Tensor] = []  # whose gradients are wanted: not those of leaves with values
        self.drawn = 0  # how many operators drew random numbers
        self.ended: list[tuple[int, int]] = []  # of each interval: the most bytes, and those of casts when it began

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        if func in _SPACIOUS:
            self._reached(self.now + workspace(func, args, out))
        self.drawn += torch.Tag.nondeterministic_seeded in func.tags
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.before:
            self.cast += out.untyped_storage().nbytes()
        return out

    def known(self, tensor: Tensor) -> None:
        """Count this tensor as having been there before."""
        self.before.add(tensor.untyped_storage()._cdata)
        self._count(tensor.untyped_storage(), 0)

    def mark(self) -> int:
        """Begin the next interval; its number."""
        self.ended.append((self.most, self.cast))
        self.most = self.now
        return len(self.ended)

    def usage(self, cached: bool) -> list[int]:
        """The most bytes of each interval; `cached`: casts of parameters are kept to the end of the one that they are made in."""
        cast = [*(cast for _, cast in self.ended), self.cast]
        made = [now - before for now, before in zip(cast, [0, *cast], strict=False)]
        most = [*(n for n, _ in self.ended), self.most]
        return [n + own if cached else n for n, own in zip(most, made, strict=True)]

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
        self._reached(self.now)

    def _reached(self, bytes_: int) -> None:
        self.most, self.peak = max(self.most, bytes_), max(self.peak, bytes_)


_SPACIOUS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "convolution", "convolution_backward", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
        "native_batch_norm_backward",
    )
    if hasattr(torch.ops.aten, name)
}  # fmt: skip


def workspace(func: Any, args: Any, out: Any) -> int:
    """Bytes that a kernel has inside.

    On a CPU oneDNN lays input, weights and output of a convolution out anew, with channels rounded up to its blocks of 16 (images
    of up to 3 channels stay as they are), unless the kernel is of one pixel and goes to each; batch norm's backward has another array
    of the size of its input. (So on CPUs with AVX-512. With AVX2 alone it has other ways, some of which take more.) On a GPU fused
    attention adds up the gradient of its queries in float32.
    """
    if "attention" in str(func):
        return 4 * int(args[1].numel()) if args[1].is_cuda else 0
    if func is torch.ops.aten.native_batch_norm_backward.default:
        return int(args[1].numel() * args[1].element_size()) if args[1].device.type == "cpu" else 0
    back = func is torch.ops.aten.convolution_backward.default
    y, x, weight = args[:3] if back else (out, *args[:2])
    if x.device.type != "cpu":
        return 0
    if math.prod((*weight.shape[2:], *args[3 + back])) == 1:
        return 0
    inside = _in_blocks(y) + _in_blocks(x if x.shape[1] > 3 else y)
    inside += (1 if weight.is_contiguous() else 1 + back) * weight.numel()
    return int(x.element_size()) * inside


def _in_blocks(t: Tensor) -> int:
    return t.shape[0] * -(-t.shape[1] // 16) * 16 * math.prod(t.shape[2:])


class FusedAttention(TorchFunctionMode):
    """Attention without values takes the path that keeps all weights; on a CPU it does so only where weights are dropped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dropped = kwargs.get("dropout_p", 0.0)
        if func is F.scaled_dot_product_attention and len(args) == 3 and args[0].dim() == 4 and not dropped:
            return _Fused.apply(*args, kwargs.get("attn_mask"), kwargs.get("enable_gqa", False))
        return func(*args, **kwargs)


def attention_of(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """What calls of attention are to be put into where the model is."""
    return FusedAttention if device_of(model) == "cpu" else nullcontext


def device_of(model: nn.Module) -> str:
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


@contextmanager
def dry(model: nn.Module, inputs: Any) -> Iterator[tuple[Meter, Any]]:
    """Inside, the model is without values, in grad mode, and what is made is counted; the meter, and the inputs without values."""
    mode, meter = mode_of(model) or Trial(), Meter()
    with _ended(mode), mode, without_values(model, mode), torch.enable_grad(), attention_of(model)():
        inputs = tree_map(lambda t: _alone(_fake(t, mode)), inputs)
        for tensor in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)):
            if isinstance(tensor, Tensor):
                meter.known(tensor)
                if tensor.is_leaf and tensor.requires_grad:
                    tensor.grad = torch.zeros_like(tensor)
                    meter.known(tensor.grad)
                    meter.leaves.append(tensor)
        with meter:
            yield meter, inputs


@contextmanager
def unseen(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Leave no trace of a run without values that nobody asked for: no hooks, nothing compiled, no cached casts, no random
    numbers, and every attribute of the modules as it was (a mask made once and kept would be one without values)."""
    modules = list(modules)
    attributes = [(m.__dict__, dict(m.__dict__)) for m in modules]
    held = [v for _, own in attributes for v in own.values()]
    attributes += [(v.__dict__, dict(v.__dict__)) for v in held if _own_object(v)]
    inside = [
        (v, copy.copy(v)) for _, own in attributes for v in list(own.values()) if isinstance(v, dict | list | set)
    ]
    tables = [(table, table.cache_info().misses) for table in _tables(own for _, own in attributes)]
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    kept = [
        (own, dict(own)) for m in modules for name in names if (own := getattr(m, name))
    ]  # other than PyTorch's own
    cached, log = torch.is_autocast_cache_enabled(), logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators += torch.cuda.default_generators
    places = [g.get_state() for g in generators]
    try:
        for own, hooks in kept:
            for key, hook in hooks.items():
                if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                    del own[key]
        torch.set_autocast_cache_enabled(False)
        log.setLevel(logging.CRITICAL)  # what cannot be run without values is said in other ways, or does no harm
        with torch.compiler.set_stance("force_eager"), saved_tensors_hooks(_itself, _itself):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        log.setLevel(level)
        for own, was in (*attributes, *kept, *((v, was) for v, was in inside if not isinstance(v, list))):
            own.clear()
            own.update(was)
        for values, was in inside:
            if isinstance(values, list):
                values[:] = was
        for table, misses in tables:
            if table.cache_info().misses > misses:  # what was put there has no values
                table.cache_clear()
        for generator, place in zip(generators, places, strict=True):
            generator.set_state(place)


def _tables(attributes: Iterable[dict[str, Any]]) -> list[Any]:
    """Every `lru_cache`; where `gc.freeze` has put objects out of sight, those of modules, of their classes, and in `attributes`."""
    found: list[Any] = gc.get_objects()
    if gc.get_freeze_count():
        todo = [
            v for m in list(sys.modules.values()) if issubclass(type(m), ModuleType) for v in list(_names(m).values())
        ]
        todo += [v for own in attributes for v in own.values()]
        seen = set[int]()
        while todo:
            v = todo.pop()
            if id(v) not in seen:
                seen.add(id(v))
                found.append(v)
                todo += _inside(v)
    return list({id(f): f for f in found if type(f) is functools._lru_cache_wrapper}.values())


def _names(module: ModuleType) -> dict[str, Any]:
    """A module's own, whatever it does when it is asked: a lazy one would be imported."""
    found: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return found


def _inside(value: Any) -> list[Any]:
    """What a class holds, or what a function or a method has been made of."""
    kind = type(value)
    if issubclass(kind, type):
        return list(type.__dict__["__dict__"].__get__(value).values())
    if kind in (staticmethod, classmethod):
        return [value.__func__]
    if kind is property:
        return [value.fget]
    return [value.__dict__["__wrapped__"]] if kind is FunctionType and "__wrapped__" in value.__dict__ else []


def _own_object(value: Any) -> bool:
    """Whether it may hold tensors of its own."""
    ours = type(value).__module__.startswith("retrograde.")
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor | type)
        and not callable(value)
        and not ours
    )


def plain(tensors: Iterable[Any]) -> bool:
    """Whether all tensors among these are of plain kind, so that they can be replaced by ones without values."""
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors if isinstance(t, Tensor))


def _itself(t: Tensor) -> Tensor:
    return t


class Trial(FakeTensorMode):
    """The mode of one run without values. What that run leaves behind where nobody can find it is refused afterwards, whoever uses it:
    else what follows would be without values too, gradients included, and not every kernel looks."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # tensors that a block has as plain attributes
        self.runs, self.over = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            raise TypeError(
                f"a tensor without values is used ({func}). It was made in the step in which memory was planned, and kept outside of "
                "the model's modules: in a global variable, a closure, or a cache that was not found. Clear that, and keep the "
                "tensor as a buffer of its module, or convert without a budget."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """That of a model without values; of any other None."""
    return next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)


@contextmanager
def _ended(mode: FakeTensorMode) -> Iterator[None]:
    """After this its tensors are of no use, if it is a mode of ours."""
    if not isinstance(mode, Trial):
        yield
        return
    mode.runs += 1
    try:
        yield
    finally:
        mode.runs -= 1
        mode.over = not mode.runs


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value


def _alone(value: Any) -> Any:
    """A tensor without what made it."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@contextmanager
def without_values(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Parameters and buffers without values in the place of the model's own for a while."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (own, dict(own)) for m in model.modules() for own in (m._parameters, m._buffers)
    ]
    try:
        for own, entries in kept:
            own.update({name: _fake(t, mode) for name, t in entries.items()})
        yield
    finally:
        for own, entries in kept:
            own.update(entries)
