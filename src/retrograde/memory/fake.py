"""A training step on a copy of the model whose tensors have no values.

    usage = the most bytes alive in each interval between two marks

Nothing is computed and nothing is allocated, but every tensor has its size, and every allocation is counted. The copy is
thrown away afterwards, so the user's model, its caches, hooks, counters and random numbers stay as they are. Fake tensors that
outlive the copy, in a global cache say, raise on use.

Memory that kernels allocate and free inside is not seen. Some of it is known well enough to be added (`workspace`).
"""

from __future__ import annotations

import copy
import logging
import math
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .step import bytes_of, tensors_of


class Meter(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is on, until the tensor is freed. `mark` begins a new interval."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.drawn = 0  # how many operators drew random numbers
        self.usage = [0]  # the most bytes of each interval so far
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        if func in _SPACIOUS:
            self._reached(self.now + workspace(func, args, out))
        self.drawn += torch.Tag.nondeterministic_seeded in func.tags
        return out

    def mark(self) -> int:
        """Begin the next interval. Returns its number."""
        self.usage.append(self.now)
        return len(self.usage) - 1

    def count(self, tensor: Tensor, size: int | None = None) -> None:
        """Count the tensor's memory once, until it is freed. `size`: instead of its own; 0 for what was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes() if size is None else size

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self._reached(self.now)

    def _reached(self, bytes_: int) -> None:
        self.usage[-1] = max(self.usage[-1], bytes_)
        self.peak = max(self.peak, bytes_)


_SPACIOUS = {
    getattr(torch.ops.aten, name).default
    for name in (
        "convolution", "convolution_backward", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
        "native_batch_norm_backward", "mm",
    )
    if hasattr(torch.ops.aten, name)
}  # fmt: skip


def workspace(func: Any, args: Any, out: Any) -> int:
    """Bytes that a kernel allocates inside.

    On a CPU with AVX-512, oneDNN copies input, weights and output of a convolution into blocks of 16 channels (images of up to 3
    channels stay as they are), unless the kernel is of one pixel and stride 1. Batch norm's backward has another array of the size
    of its input. A product in bfloat16 whose first factor is transposed, as the gradient of a weight is, copies factors and output
    into blocks, up to 0.6 MB. (With AVX2 alone oneDNN has other ways, some of which take more.) On a GPU fused attention adds up
    the gradient of its queries in float32.
    """
    if func is torch.ops.aten.mm.default:
        a, b = args
        if a.device.type != "cpu" or a.dtype != torch.bfloat16 or a.is_contiguous():
            return 0
        return min(int(a.element_size() * (a.numel() + b.numel() + out.numel())), 600_000)
    if "attention" in str(func):
        return 4 * int(args[1].numel()) if args[1].is_cuda else 0
    if func is torch.ops.aten.native_batch_norm_backward.default:
        return int(args[1].numel() * args[1].element_size()) if args[1].device.type == "cpu" else 0
    backward = func is torch.ops.aten.convolution_backward.default
    y, x, weight = args[:3] if backward else (out, *args[:2])
    if x.device.type != "cpu" or math.prod((*weight.shape[2:], *args[3 + backward])) == 1:
        return 0
    inside = _in_blocks(y) + _in_blocks(x if x.shape[1] > 3 else y)
    inside += (1 if weight.is_contiguous() else 1 + backward) * weight.numel()
    return int(x.element_size()) * inside


def _in_blocks(t: Tensor) -> int:
    return t.shape[0] * -(-t.shape[1] // 16) * 16 * math.prod(t.shape[2:])


class FusedAttention(TorchFunctionMode):
    """On a CPU, real attention is fused unless weights are dropped. Fake attention never is, so this puts it right."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dropped = kwargs.get("dropout_p", 0.0)
        if func is F.scaled_dot_product_attention and len(args) == 3 and args[0].dim() == 4 and not dropped:
            return _Fused.apply(*args, kwargs.get("attn_mask"), kwargs.get("enable_gqa", False))
        return func(*args, **kwargs)


def attention_on(device: str) -> AbstractContextManager[Any]:
    """What fake blocks are run in on this kind of device. Function modes are off in backward, so each replay needs it too."""
    return FusedAttention() if device == "cpu" else nullcontext()


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


class PlanningMode(FakeTensorMode):
    """The mode of one copy. Its tensors raise on use once the copy is thrown away.

    Otherwise code that caches a fake tensor would go on without values: gradients would vanish, or a kernel would crash.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # tensors in closures and global variables
        self.over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            raise RuntimeError(  # a TypeError is swallowed by `+` and its like, which then name two classes of tensors
                f"a tensor without values is used ({func}). It was made when memory was planned on a copy of the model, and was "
                "kept outside of the model: in a global variable, a closure or a cache. Clear that, and keep the tensor as a buffer "
                "of its module, or plan without a budget."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def is_fake(value: Any) -> bool:
    """Whether this is a tensor without values."""
    return isinstance(value, FakeTensor)


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of a model without values; None for any other."""
    return next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)


def plain(tensors: Iterable[Any]) -> bool:
    """Whether all tensors among these are of PyTorch's own kind, so that a copy can have fake ones instead."""
    return all(type(t) in (Tensor, nn.Parameter) for t in tensors if isinstance(t, Tensor))


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@dataclass
class Copy:
    """A model without values, the objects copied with it, and the meter that counts.

    Attributes:
        known: the tensors that exist before the step: parameters, buffers, inputs.
        leaves: tensors whose gradients are wanted.
    """

    model: nn.Module
    others: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    meter: Meter
    known: list[Tensor]
    leaves: list[Tensor]


@contextmanager
def fake_copy(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], others: Any = None) -> Iterator[Copy]:
    """A copy of the model and its inputs without values, in grad mode, in which every allocation is counted.

    User hooks do nothing in it: they may write to what is not copied. A model that has no values already is copied too.

    Args:
        others: objects that refer to parts of the model, to be copied with it.
    """
    mode = mode_of(model) or PlanningMode()
    tensors = [
        t for t in (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))) if isinstance(t, Tensor)
    ]
    fakes = {id(t): _fake(t, mode) for t in tensors}
    memo: dict[int, Any] = dict(fakes)
    with FakeCopyMode(mode):
        model, others, args, kwargs = copy.deepcopy((model, others, tuple(args), dict(kwargs)), memo)
    silence_hooks(model)
    meter = Meter()
    known: list[Tensor] = [t for t in memo.values() if is_fake(t)]  # with those that modules have as plain attributes
    leaves = [t for t in known if t.is_leaf and t.requires_grad]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
        meter.count(leaf.grad, 0)
    for tensor in known:
        meter.count(tensor, 0)
    try:
        with no_trace(), mode, torch.enable_grad(), attention_on(device_of(model).type), meter:
            yield Copy(model, others, args, kwargs, meter, known, leaves)
    finally:
        if isinstance(mode, PlanningMode):
            mode.over = True


def _fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    """The tensor without values, and without what made it."""
    fake: Tensor = t if isinstance(t, FakeTensor) else mode.from_tensor(t)
    fake = fake.detach().requires_grad_(t.requires_grad)
    return nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake


def silence_hooks(model: nn.Module) -> None:
    """Let hooks do nothing, but be there: blocks may run in another way because of them. PyTorch's own do what they do."""
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            hooks = getattr(module, name)
            for key, hook in hooks.items():
                if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                    hooks[key] = _nothing_heard


def _nothing_heard(*_: Any, **__: Any) -> None: ...


@contextmanager
def no_trace() -> Iterator[None]:
    """Compile nothing, draw no random numbers, log nothing, and show the user's saved-tensor hooks nothing."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    state = random.getstate()
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators += torch.cuda.default_generators
    places = [g.get_state() for g in generators]
    cached, parametrize._cache = parametrize._cache, {}  # a copy's are known there by the modules of the original
    log.setLevel(logging.CRITICAL)
    try:
        with torch.compiler.set_stance("force_eager"), saved_tensors_hooks(_itself, _itself):
            yield
    finally:
        log.setLevel(level)
        parametrize._cache = cached
        random.setstate(state)
        for generator, place in zip(generators, places, strict=True):
            generator.set_state(place)


def _itself(t: Tensor) -> Tensor:
    return t


def run_step(fake: Copy, loss: Callable[[Any], Tensor], autocast: torch.dtype | None) -> tuple[int, int, int]:
    """Run a training step on the copy. Returns bytes held before backward, bytes of the output, and backward's interval.

    Args:
        autocast: the dtype of automatic mixed precision; None: as it is set now.
    """
    device = device_of(fake.model).type
    dtype = autocast or torch.get_autocast_dtype(device)
    enabled = autocast is not None or torch.is_autocast_enabled(device)
    with torch.autocast(device, dtype, enabled=enabled):
        out = fake.model(*fake.args, **fake.kwargs)
        scalar = loss(out)
    torch.clear_autocast_cache()  # an outer autocast would hold the casts on
    size = bytes_of(t for t in tensors_of(out) if t.is_floating_point())
    del out
    held = fake.meter.now
    interval = fake.meter.mark()
    torch.autograd.backward(scalar, inputs=fake.leaves or None)
    return held, size, interval
