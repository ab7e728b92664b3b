"""A training step on a copy of the model whose tensors have no values.

    usage = the most bytes alive in each interval between two marks

Nothing is computed and nothing is allocated, but every tensor has its size, and every allocation is counted. The copy is
thrown away afterwards, so the user's model, its caches, hooks, counters and random numbers stay as they are. An `lru_cache` that the
copy fills is emptied. Other fake tensors that outlive the copy, in a global variable say, raise on use.

Memory that kernels allocate and free inside is not seen. Some of it is known well enough to be added (`INSIDE`).
"""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeCopyMode
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
        self.stored = [0]  # the same, if nothing were freed of what autograd saves in it
        self.freed = 0  # of that, in this interval
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if KEEPS is not None and func is KEEPS.default and is_fake(out[3]):  # without values it is empty
            out = (*out[:3], out[3].new_empty(recurrent_kept(args[0], args[5])))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        if func in INSIDE:
            self._reached(self.now + INSIDE[func](args, out))
        self.drawn += torch.Tag.nondeterministic_seeded in func.tags
        return out

    def mark(self) -> int:
        """Begin the next interval. Returns its number."""
        self.usage.append(self.now)
        self.stored.append(self.now)
        self.freed = 0
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

    def saved(self, size: int) -> Callable[[Any], None]:
        """Autograd has saved so many bytes, which a plain run would not free; to be called when they are freed."""
        interval = len(self.usage)

        def freed(_: Any) -> None:
            if interval == len(self.usage):
                self.freed += size

        return freed

    def _reached(self, bytes_: int) -> None:
        self.usage[-1] = max(self.usage[-1], bytes_)
        self.stored[-1] = max(self.stored[-1], bytes_ + self.freed)
        self.peak = max(self.peak, bytes_)


def _convolution(args: Any, out: Any, backward: bool) -> int:
    """On a CPU with AVX-512, oneDNN copies input, weights and output into blocks of 16 channels (images of up to 3 channels stay
    as they are), unless the kernel is of one pixel and stride 1; of 16 bits it adds up in 32. (With AVX2 alone oneDNN has other ways,
    some of which take more.)
    """
    y, x, weight = args[:3] if backward else (out, *args[:2])
    if x.device.type != "cpu":
        return 0
    sums = 4 * max(x.numel(), y.numel()) if x.element_size() < 4 else 0
    if math.prod((*weight.shape[2:], *args[3 + backward])) == 1:
        return sums
    inside = _in_blocks(y) + _in_blocks(x if x.shape[1] > 3 else y)
    inside += (1 if weight.is_contiguous() else 1 + backward) * weight.numel()
    if x.dim() == 3 and not x.is_contiguous():
        inside += x.numel() + backward * y.numel()
    return int(x.element_size()) * inside + sums


def _in_blocks(t: Tensor) -> int:
    return t.shape[0] * -(-t.shape[1] // 16) * 16 * math.prod(t.shape[2:])


def _product(a: Tensor, b: Tensor) -> int:
    """Of bfloat16 on a CPU: each thread has factors and output in blocks, up to 96 kB; a transposed first factor twice."""
    if a.device.type != "cpu" or a.dtype != torch.bfloat16:
        return 0
    (m, k), n = a.shape[-2:], b.shape[-1]
    k, n = -(-k // 32) * 32, -(-n // 64) * 64
    again = min(2 * m * k, 2**17) if a.stride(-1) != 1 else 0
    return torch.get_num_threads() * (min(2 * (m * k + k * n + m * n), 3 * 2**15) + again + 2**10)


def _recurrent(x: Tensor, state: Tensor, itemsize: int) -> int:
    """Weights in another order, and the gates of all times."""
    gates = 4 * state.shape[-1]
    weights = gates * (x.shape[-1] + state.shape[-1])
    return itemsize * (math.prod(x.shape[:-1]) * gates + weights) + 2**14


def recurrent_kept(x: Tensor, state: Tensor) -> int:
    """Bytes that oneDNN keeps of an LSTM's layer for its gradient: per time and row 9 times the state and 6.5 times the larger of state
    and input (fitted to six sizes; too much by up to a third where there is little)."""
    hidden = state.shape[-1]
    each = 9 * hidden + 13 * max(hidden, x.shape[-1]) // 2
    return (x.shape[0] + 1) * math.prod(x.shape[1:-1]) * each * (4 if x.dtype == torch.float32 else 3) + 7 * 2**12


def _on_cpu(t: Tensor, times: float = 1) -> int:
    return int(times * t.numel() * t.element_size()) if t.device.type == "cpu" else 0


def _promoted(args: Any, out: Any) -> int:
    """Of two dtypes, one is brought to the other's."""
    tensors = [t for t in args[:2] if isinstance(t, Tensor) and t.dim() and t.dtype != out.dtype]
    return int(out.dtype.itemsize * sum(map(Tensor.numel, tensors))) if out.device.type == "cpu" else 0


def _averaged(args: Any, out: Any) -> int:
    """In 16 bits, by way of float32."""
    x = args[0]
    return 4 * (x.numel() + out.numel()) if x.device.type == "cpu" and x.dtype.itemsize < 4 else 0


def _of_queries(args: Any, out: Any) -> int:
    return 4 * int(args[1].numel()) if args[1].is_cuda else 0


_INSIDE: dict[str, Callable[[Any, Any], int]] = {
    "convolution": lambda args, out: _convolution(args, out, backward=False),
    "convolution_backward": lambda args, out: _convolution(args, out, backward=True),
    "mm": lambda args, out: _product(*args),
    "bmm": lambda args, out: _product(*args),
    "addmm": lambda args, out: _product(*args[1:3]),
    "baddbmm": lambda args, out: _product(*args[1:3]),
    "add.Tensor": _promoted,
    "sub.Tensor": _promoted,
    "mul.Tensor": _promoted,
    "div.Tensor": _promoted,
    "mean.dim": _averaged,
    "abs": lambda args, out: _on_cpu(args[0]) if args[0].is_complex() else 0,
    "upsample_nearest2d": lambda args, out: _on_cpu(args[0]) + _on_cpu(out),
    "native_batch_norm_backward": lambda args, out: _on_cpu(args[1]),
    "linalg_matrix_exp": lambda args, out: _on_cpu(args[0], 12.5),
    "_fft_r2c": lambda args, out: _on_cpu(args[0]),
    "_fft_c2r": lambda args, out: _on_cpu(args[0]),
    "_fft_c2c": lambda args, out: _on_cpu(args[0]),
    "mkldnn_rnn_layer": lambda args, out: _recurrent(args[0], args[5], args[0].element_size()),
    "mkldnn_rnn_layer_backward": lambda args, out: _recurrent(args[0], args[5], 4),
    "_scaled_dot_product_flash_attention_backward": _of_queries,
    "_scaled_dot_product_efficient_attention_backward": _of_queries,
    "_scaled_dot_product_cudnn_attention_backward": _of_queries,
}  # fmt: skip
"""By operator, the bytes that its kernel allocates inside, from its arguments and its output: measured. On a GPU fused attention adds
up the gradient of its queries in float32."""
INSIDE: dict[Any, Callable[[Any, Any], int]] = {}
for _name, _of in _INSIDE.items():
    _packet, _, _overload = _name.partition(".")
    if hasattr(torch.ops.aten, _packet):
        INSIDE[getattr(getattr(torch.ops.aten, _packet), _overload or "default")] = _of
KEEPS = getattr(torch.ops.aten, "mkldnn_rnn_layer", None)
GROUPED: Any = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
"""The product of experts, one matrix each."""


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

    Args:
        guesses: where the model looks at a value, it sees False, 0.5 or 1: a mask is not causal. A single number that is drawn is
            0.5, also in what is computed of it, and a coin is 1: a layer is there, if it is left out less than every other time.
    """

    def __init__(self, guesses: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)  # tensors in closures and global variables
        self.guesses = guesses
        self.over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            raise RuntimeError(  # a TypeError is swallowed by `+` and its like, which then name two classes of tensors
                f"a tensor without values is used ({func}). It was made when memory was planned on a copy of the model, and was "
                "kept outside of the model: in a global variable, a closure or a cache. Clear that, and keep the tensor as a buffer "
                "of its module, or plan without a budget."
            )
        try:
            if func is GROUPED and args[0].dtype != torch.bfloat16:  # without values it is only known in that dtype
                halves = (t.to(torch.bfloat16) for t in args[:2])
                out: Any = super().__torch_dispatch__(func, types, (*halves, *args[2:]), kwargs)
                return out.to(args[0].dtype)
            out = super().__torch_dispatch__(func, types, args, kwargs)
            drawn = self.guesses and torch.Tag.nondeterministic_seeded in func.tags
            if drawn and isinstance(out, FakeTensor) and out.numel() == 1 and out.dtype.is_floating_point:
                guess = 1 if "bernoulli" in str(func) else 0.5
                out.constant = torch.full(out.shape, guess, dtype=out.dtype)
            return out
        except DataDependentOutputException:
            if not self.guesses or func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.5 if dtype.is_floating_point else 1


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
def fake_copy(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], others: Any = None, guesses: bool = False
) -> Iterator[Copy]:  # fmt: skip
    """A copy of the model and its inputs without values, in grad mode, in which every allocation is counted.

    User hooks do nothing in it: they may write to what is not copied. A model that has no values already is copied too.

    Args:
        others: objects that refer to parts of the model, to be copied with it.
        guesses: as of `PlanningMode`.
    """
    given = mode_of(model)
    mode = given or PlanningMode(guesses)
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
    caches = [(cache, cache.cache_info().misses) for cache in _caches_near(model)]
    try:
        with no_trace(), mode, torch.enable_grad(), attention_on(device_of(model).type), meter:
            yield Copy(model, others, args, kwargs, meter, known, leaves)
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses:  # it has something of this step
                cache.cache_clear()
        if given is None and isinstance(mode, PlanningMode):
            mode.over = True


_OF_NO_USER = {"builtins", "torch", "retrograde"}


def _caches_near(model: nn.Module) -> set[Any]:
    """The `functools.lru_cache`s that code of the model's packages, its classes or its modules may fill."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - _OF_NO_USER
    spaces = [vars(code) for name, code in list(sys.modules.items()) if name.partition(".")[0] in packages]
    found: set[Any] = set()
    for space in (*spaces, *map(vars, classes), *map(vars, model.modules())):
        for value in list(space.values()):
            reached = [value]  # and, of a decorated function, what the decorator made
            for cell in value.__closure__ or () if isinstance(value, FunctionType) else ():
                with suppress(ValueError):  # an empty cell
                    reached.append(cell.cell_contents)
            found.update(each for each in reached if isinstance(each, _lru_cache_wrapper))
    return found


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
