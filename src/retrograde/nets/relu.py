"""Blocks that compute relu(x + f(x)): whether a block is one, as it is now, and its f.

    out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    out += x
    return self.relu(out)

A step of form "relu" runs f alone and forms the sum and the relu itself. That is right only if the block does nothing else. So the
code of its forward is run on stand-ins for the block and for x, which note the calls of submodules and raise on everything else.
The code finds no global names and no built-in functions, so it can do nothing but that: no other code runs, nothing is computed, and
nothing is left behind but what the code looked up. While that is the same, the next step does not run it again. A block of any other
kind runs as it is.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _every_module
from torch.nn.modules.batchnorm import _BatchNorm

Branch = Callable[[Any, Tensor], Tensor]
DEEPEST = 64
"""Blocks of a stage up to which form "relu" is taken without being asked for: it keeps one bit an element and block until backward,
which for so many blocks is no more than x and v take."""
_READERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, _BatchNorm, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm)
"""Modules that neither write to their input nor return a view of it."""
_REFUSED = {"SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO", "STORE_GLOBAL"}
"""Instructions that would hide what a stand-in raises, or write to global names."""


class _StandIn:
    """For a block or a submodule: `of` makes of it what is asked for. Code that is run on it uses no names such as these."""

    __slots__ = ("__of__",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, of: Callable[[Any], Any]) -> None:
        self.__of__ = of

    def __getattr__(self, name: str) -> Any:
        return self.__of__(name)

    def __call__(self, value: Any, /) -> Any:
        return self.__of__(value)

    def __bool__(self) -> bool:
        raise TypeError("not known")

    def __eq__(self, other: object) -> bool:
        raise TypeError("not known")


class _Value(_StandIn):
    """For a tensor: x; f, made of x by the submodules `calls`; x + f; or what the submodule `last` makes of that.

    `how`: x was added by "+" or by "+=".
    """

    __slots__ = ("__calls__", "__how__", "__last__")

    def __init__(self, calls: tuple[str, ...] = (), how: str = "", last: str = "") -> None:
        super().__init__(_nothing)
        self.__calls__, self.__how__, self.__last__ = calls, how, last

    def __add__(self, other: Any) -> _Value:
        if self.__how__ or other.__how__ or bool(self.__calls__) == bool(other.__calls__):
            raise TypeError("not a sum of x and f")
        return _Value(self.__calls__ or other.__calls__, "+")

    def __iadd__(self, other: Any) -> _Value:
        self + other  # of x itself, which is written to then, the calls do not become f
        self.__how__ = "+="
        return self


def _nothing(_: Any) -> Any:
    raise TypeError("a tensor has no submodules")


def branch_of(block: nn.Module, cls: type[nn.Module] | None = None) -> Branch | None:
    """f(block, x) of a block that computes relu(x + f(x)), as it is now; None if it is not known to.

    Args:
        cls: the class whose forward the block runs; None: its own.

    >>> from retrograde.nets.resnet import BasicBlock
    >>> block, x = BasicBlock(4, 4), torch.randn(2, 4, 5, 5)
    >>> f = branch_of(block)
    >>> torch.equal(torch.relu(x + f(block, x)), block(x))
    True
    """
    cls = cls or type(block)
    known = _known.get(block)
    if known is None or known.cls is not cls or not known.holds(block):
        value, seen = _traced(block, cls)
        known = _known[block] = _Trace(cls, value, seen)
    value = known.value
    if value is None or not value.__last__:
        return None
    calls, how = value.__calls__, value.__how__
    if not is_plain(getattr(block, value.__last__), nn.ReLU) or not _only_reads(getattr(block, calls[0])):
        return None
    if how == "+=" and any(m._forward_hooks for m in getattr(block, calls[-1]).modules()):
        return None  # a hook that keeps f sees the sum written over it
    return _branch(calls, how)


@lru_cache(256)
def _branch(calls: tuple[str, ...], how: str) -> Branch:
    """These submodules one after another; blocks that are alike share one function, which is compiled once."""

    def branch(block: Any, x: Tensor) -> Tensor:
        y = x
        for name in calls:
            y = getattr(block, name)(y)
        if how == "+" and isinstance(y, Tensor):  # in place the sum has the shape and dtype of f
            if y.shape != x.shape:
                y = y.expand(torch.broadcast_shapes(y.shape, x.shape)).contiguous()
            if y.dtype != x.dtype:
                y = y.to(torch.promote_types(x.dtype, y.dtype))
        return y

    return branch


_MISSING = object()


def _looked_up(block: nn.Module, cls: type[Any], name: str) -> tuple[Any, Any]:
    """What a block has under a name: a method of its class, with its code; or what is no method."""
    of_class = getattr(cls, name, _MISSING)
    if isinstance(of_class, FunctionType) and name not in block.__dict__:
        return of_class, of_class.__code__
    return _MISSING, getattr(block, name) if of_class is _MISSING else _MISSING


class _Trace:
    """What the forward of a block was seen to return, and what it looked up for that: it holds while that is the same.

    Submodules are held weakly: they may lead to the block, which is to go when nobody else has it.
    """

    def __init__(self, cls: type[Any], value: _Value | None, seen: dict[str, tuple[Any, Any]]) -> None:
        self.cls = cls
        self.value = value
        self.seen = {
            name: (method, ref(other) if isinstance(other, nn.Module) else other)
            for name, (method, other) in seen.items()
        }

    def holds(self, block: nn.Module) -> bool:
        for name, (method, other) in self.seen.items():
            was = other() if isinstance(other, ref) else other
            gone = was is None and other is not None
            now, part = _looked_up(block, self.cls, name)
            if gone or now is not method or part is not was:
                return False
            if isinstance(part, nn.Identity) and not is_plain(part, nn.Identity):
                return False
        return self.value is not None  # a block that is no such block is looked at again


_known: WeakKeyDictionary[nn.Module, _Trace] = WeakKeyDictionary()


def _traced(block: nn.Module, cls: type[Any]) -> tuple[_Value | None, dict[str, tuple[Any, Any]]]:
    """What forward(x) returns, if that is all that it does, and what it looks up."""
    seen: dict[str, tuple[Any, Any]] = {}
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        return None, seen
    called: list[str] = []
    parts: dict[nn.Module, _StandIn] = {}

    def call(name: str, same: bool, value: Any) -> _Value:
        if not isinstance(value, _Value) or value.__last__:
            raise TypeError("not a chain of submodules")
        if same:
            return value
        called.append(name)
        if value.__how__:
            return _Value(value.__calls__, value.__how__, name)
        return _Value((*value.__calls__, name))

    def see(name: str) -> Any:
        method, part = seen[name] = _looked_up(block, cls, name)
        if method is not _MISSING:
            return partial(_alone(method), this)
        if part is None:
            return None
        if not isinstance(part, nn.Module):
            raise TypeError("neither a method nor a submodule")
        same = isinstance(part, nn.Identity) and is_plain(part, nn.Identity)
        return parts.setdefault(part, _StandIn(partial(call, name, same)))

    this = _StandIn(see)
    try:
        value = see("forward")(_Value())
    except Exception:  # whatever code raises that finds nothing of what it needs
        return None, seen
    whole = isinstance(value, _Value) and called == [*value.__calls__, *filter(None, [value.__last__])]
    return (value if whole else None), seen


def _alone(function: FunctionType) -> FunctionType:
    """The function without global names and built-in functions."""
    if function.__defaults__ or not _is_simple(function.__code__):
        raise TypeError("a method that is not followed")
    return FunctionType(function.__code__, {"__builtins__": {}})


@lru_cache(256)
def _is_simple(code: CodeType) -> bool:
    """Whether code can do no more than use what it is given, and hides no error."""
    others = code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    inside = code.co_freevars or any(isinstance(const, CodeType) for const in code.co_consts)
    hidden = any(name.startswith("__") for name in code.co_names)
    return not (others or inside or hidden) and not any(i.opname in _REFUSED for i in dis.get_instructions(code))


def _only_reads(module: Any) -> bool:
    """Whether a module is known not to write to its input, nor to return a view of it."""
    if is_plain(module, *_READERS):
        return True
    if is_plain(module, nn.Sequential):
        return len(module) > 0 and _only_reads(module[0])
    value = _traced(module, type(module))[0] if is_plain(module, type(module)) else None
    return value is not None and bool(value.__calls__) and _only_reads(getattr(module, value.__calls__[0]))


def is_plain(module: Any, *classes: type[Any]) -> bool:
    """Whether to call the module is to run the forward of one of these classes and nothing else."""
    cls = type(module)
    return (
        isinstance(module, nn.Module)
        and cls.forward in [c.forward for c in classes]
        and cls.__call__ is nn.Module.__call__
        and cls._call_impl is nn.Module._call_impl
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
    )  # fmt: skip


def hooks_on_every_module() -> bool:
    """Whether there are hooks on every module there is: they would miss the calls that form "relu" leaves out."""
    every = _every_module
    hooks = (every._global_forward_hooks, every._global_forward_pre_hooks)
    return any((*hooks, every._global_backward_hooks, every._global_backward_pre_hooks))


class Rectified:
    """A block of relu(x + f(x)) in one pass: f alone, or the block as it is where f is not known, and for good until backward.

    Hooks on the block are for what it returns, and a compiled block is compiled as a whole: either runs as it is.
    """

    def __init__(self, block: nn.Module) -> None:
        alone = is_plain(block, type(block)) and block._compiled_call_impl is None and not hooks_on_every_module()
        self.block = block
        self.f = branch_of(block) if alone else None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(x, *args, **kwargs) if self.f is None else self.f(self.block, x, *args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        return self.block.modules()


def whole(block: Any) -> bool:
    """Whether a block of form "relu" gives relu(x + f(x)) in this pass."""
    return isinstance(block, Rectified) and block.f is None
