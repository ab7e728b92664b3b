"""Blocks that compute relu(x + f(x)): the proof that one does, and f.

    out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    out += x
    return self.relu(out)

The block's own forward is run on symbols. `self` has nothing but the submodules, which note that they were called, and what is None;
x can be given to them and be added, no more. If the code reaches for nothing else (no globals, no closure), it does to tensors what it
did to the symbols. Where that is a chain of submodules, the addition of x and an `nn.ReLU`, each once, f is the chain. What is not
proved is None: conditions on anything but the presence of a submodule, functions of torch, forwards that call another class's.

The step leaves out the last relu and reads x itself. So the relu must be a plain one without hooks, and the first module of
the chain one that does not write to its input.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _all_modules
from torch.nn.modules.batchnorm import _BatchNorm

Branch = Callable[[Any, Tensor], Tensor]
_RELU, _IDENTITY, _CHAIN = nn.ReLU.forward, nn.Identity.forward, nn.Sequential.forward
_READERS = {
    m.forward
    for m in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, _BatchNorm, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
}
"""Forwards of modules that neither write to their input nor return a view of it."""
_OUTSIDE = (
    "GLOBAL", "NAME", "DEREF", "IMPORT", "FUNCTION", "CLOSURE", "YIELD", "SUPER", "SETUP", "STORE_ATTR", "DELETE_ATTR", "SUBSCR",
)  # fmt: skip
"""Parts of the names of instructions by which code reaches for more than its arguments, or leaves something on them."""


_MISSING = object()


class _Refused(Exception):
    """The code does what is not followed."""


@dataclass(eq=False)
class _Symbol:
    """A tensor: x, what a chain of submodules made of it, their sum, or the relu of that."""

    trace: _Trace
    chain: tuple[str, ...] = ()
    sum: str = ""  # how x was added: "+" or "+="
    last: str = ""  # the submodule that the sum went through

    def _plus(self, other: Any, how: str) -> _Symbol:
        pair = (self, other)
        if not all(isinstance(s, _Symbol) and not s.sum for s in pair) or bool(self.chain) == bool(other.chain):
            self.trace.refuse()
        if how == "+=" and not self.chain:  # x itself is written to
            self.trace.refuse()
        return replace(self, chain=self.chain or other.chain, sum=how)

    def __add__(self, other: Any) -> _Symbol:
        return self._plus(other, "+")

    def __iadd__(self, other: Any) -> _Symbol:
        return self._plus(other, "+=")

    def _no(self, *_: Any) -> Any:
        self.trace.refuse()

    __bool__ = __eq__ = __getattr__ = _no
    __hash__ = None  # type: ignore[assignment]


class _Self:
    """`self` to the code: what `read` gives."""

    def __init__(self, trace: _Trace, read: Callable[[str], Any]) -> None:
        object.__setattr__(self, "_", (trace, read))

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_")[1](name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_")[0].refuse()


@dataclass(eq=False)
class _Submodule:
    """A submodule to the code: something to call with one tensor."""

    trace: _Trace
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> _Symbol:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, _Symbol) or x.last:
            return self.trace.refuse()
        self.trace.calls += 1
        return replace(x, last=self.name) if x.sum else replace(x, chain=(*x.chain, self.name))

    def _no(self, *_: Any) -> Any:
        self.trace.refuse()

    __bool__ = __eq__ = __getattr__ = _no
    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class _Trace:
    """What a forward did, and what it saw of its module when it did."""

    modules: set[str] = field(default_factory=set)
    identities: set[str] = field(default_factory=set)
    nothing: set[str] = field(default_factory=set)
    methods: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    result: _Symbol | None = None
    branch: Branch | None = None

    def refuse(self) -> Any:
        raise _Refused

    def fits(self, module: nn.Module, cls: type) -> bool:
        """Whether the forward would see the same of this module."""
        own, inner = module.__dict__, module._modules
        names = self.modules | self.identities
        return (
            not any(hasattr(cls, name) for name in names | self.nothing)  # of a subclass, which would come first
            and all(inner.get(name) is not None and name not in own for name in names)
            and all(
                (own if name in own else inner).get(name, module) is None for name in self.nothing
            )  # not elsewhere: a parameter
            and all(_is(inner.get(name), _IDENTITY) for name in self.identities)
            and all(getattr(cls, name, None) is method and name not in own for name, method in self.methods.items())
        )

    def run(self, module: nn.Module, cls: type) -> None:
        """Run the forward on symbols."""

        def read(name: str) -> Any:
            of_class = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), _MISSING)
            if isinstance(of_class, FunctionType) and name not in module.__dict__:
                self.methods[name] = of_class
                return lambda *args: self._closed(of_class)(this, *args)
            if of_class is not _MISSING or module.__dict__.get(name) is not None:
                self.refuse()
            if name not in module.__dict__ and name not in module._modules:
                self.refuse()
            inner = module._modules.get(name)
            if inner is None or name in module.__dict__:
                self.nothing.add(name)
                return None
            if _is(inner, _IDENTITY):
                self.identities.add(name)
                return _same
            self.modules.add(name)
            return _Submodule(self, name)

        this = _Self(self, read)
        try:
            result = self._closed(cls.forward, arguments=2)(this, _Symbol(self))  # type: ignore[attr-defined]
        except Exception:
            return
        if isinstance(result, _Symbol) and self.calls == len(result.chain) + bool(result.last):
            self.result = result
            self.branch = _branch(result.chain, result.sum)

    def _closed(self, function: Any, arguments: int | None = None) -> Any:
        """The function, if it looks at nothing but its arguments."""
        code = getattr(function, "__code__", None)
        if type(function) is not FunctionType or code is None:
            return self.refuse()
        several = (
            code.co_flags & 0x2AC or code.co_kwonlyargcount or function.__defaults__
        )  # *args, **kwargs, a generator
        if (
            several
            or getattr(code, "co_exceptiontable", b"")
            or (arguments is not None and code.co_argcount != arguments)
        ):
            self.refuse()
        if any(
            name in _FIELDS or name.startswith("__") for name in code.co_names
        ):  # what symbols have and tensors do not
            self.refuse()
        before: Any = None
        for i in dis.get_instructions(code):
            if any(word in i.opname for word in _OUTSIDE):
                self.refuse()
            if i.opname in ("IS_OP", "CONTAINS_OP") and not (before.opname == "LOAD_CONST" and before.argval is None):
                self.refuse()  # a symbol is another one where a tensor, or a module, may be the same
            before = i
        return function


_FIELDS = {*_Symbol.__dataclass_fields__, *_Submodule.__dataclass_fields__, "_plus", "_no"}


def _same(x: Any) -> Any:
    """An `nn.Identity` to the code."""
    return x


_known: WeakKeyDictionary[Any, list[_Trace]] = WeakKeyDictionary()


def _traced(module: nn.Module, cls: type) -> _Trace | None:
    """What the module's forward does, if it can be followed."""
    forward = getattr(cls, "forward", None)
    if type(forward) is not FunctionType or "forward" in module.__dict__:
        return None
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:  # type: ignore[attr-defined]
        return None
    for trace in _known.get(forward, ()):
        if trace.fits(module, cls):
            return trace
    trace = _Trace()
    trace.run(module, cls)
    if trace.result is None:
        return None
    _known.setdefault(forward, []).append(trace)
    return trace


def rectified(block: nn.Module, cls: type[nn.Module] | None = None) -> Branch | None:
    """f(block, x) of a block that is proved to compute relu(x + f(x)), as it is now.

    Args:
        cls: the class whose forward the block runs; None: its own.

    >>> from retrograde.nets.resnet import BasicBlock
    >>> block, x = BasicBlock(4, 4), torch.randn(2, 4, 5, 5)
    >>> f = rectified(block)
    >>> torch.equal(torch.relu(x + f(block, x)), block(x))
    True
    """
    trace = _traced(block, cls or type(block))
    if trace is None or trace.result is None or not trace.result.last:
        return None
    inner = block._modules
    if not _is(inner[trace.result.last], _RELU) or not _only_reads(inner[trace.result.chain[0]]):
        return None
    if trace.result.sum == "+=" and any(m._forward_hooks for m in inner[trace.result.chain[-1]].modules()):  # type: ignore[union-attr]
        return None  # a hook that keeps f sees the sum written over it
    return trace.branch


DEEPEST = 64
"""Blocks of a stage up to which the steps form the relu unless they are told to: its bits, one an element and block that stay from
forward to backward, are no more than x and v take. A deeper stage would not be of one size whatever its depth."""


class Rectified:
    """A block of relu(x + f(x)) in one pass: f alone, or all of it where f is not to be had.

    What is decided here holds for the runs of the backward pass, too. Hooks on the block are for what it returns, and a compiled
    block is compiled as a whole: either runs as it is.
    """

    def __init__(self, block: nn.Module) -> None:
        alone = _is(block, type(block).forward) and block._compiled_call_impl is None and not heard()
        self.block, self.f = block, rectified(block) if alone else None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(x, *args, **kwargs) if self.f is None else self.f(self.block, x, *args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        return self.block.modules()


def whole(block: Any) -> bool:
    """Whether a block of form "relu" gives relu(x + f(x)) in this pass."""
    return isinstance(block, Rectified) and block.f is None


def heard() -> bool:
    """Whether there are hooks on every module there is, which would miss the calls that are left out."""
    hooks = _all_modules
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )


def _is(module: Any, forward: Any) -> bool:
    """Whether a module runs this forward and nothing else."""
    return (
        isinstance(module, nn.Module)
        and type(module).forward is forward
        and type(module).__call__ is nn.Module.__call__
        and type(module)._call_impl is nn.Module._call_impl
        and "forward" not in module.__dict__
        and not (
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        )
    )


def _only_reads(module: Any) -> bool:
    """Whether a module is known not to write to its input, nor to hand on a view of it."""
    forward = getattr(type(module), "forward", None)
    if not _is(module, forward):
        return False
    if forward in _READERS:
        return True
    if forward is _CHAIN:
        return len(module) > 0 and _only_reads(module[0])
    trace = _traced(module, type(module))
    if trace is None or trace.result is None or not trace.result.chain:
        return False
    return _only_reads(module._modules[trace.result.chain[0]])


def _branch(chain: tuple[str, ...], how: str) -> Branch:
    def branch(block: Any, x: Tensor) -> Tensor:
        y = x
        for name in chain:
            y = getattr(block, name)(y)
        if how == "+" and isinstance(y, Tensor):  # in place the sum has the shape and dtype of f
            if y.shape != x.shape:
                y = y.expand(torch.broadcast_shapes(y.shape, x.shape)).contiguous()
            if y.dtype != x.dtype:
                y = y.to(torch.promote_types(x.dtype, y.dtype))
        return y

    return branch
