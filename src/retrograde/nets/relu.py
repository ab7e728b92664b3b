"""Blocks that compute relu(x + f(x)): whether a block is one, as it is now, and its f.

    out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
    out += x
    return self.relu(out)

A step of form "relu" runs f alone and forms the sum and the relu itself. That is right only if the block does nothing else. So the
source of its forward is checked first: it may call submodules and its own methods, add, and ask whether a submodule is None. Then it
is run once on stand-ins, which note the calls; nothing is computed and no other code runs. A block of any other kind runs as it is.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

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
_ALLOWED = (
    ast.Assign, ast.AugAssign, ast.BinOp, ast.operator, ast.If, ast.IfExp, ast.Compare, ast.Is, ast.IsNot, ast.Return, ast.Expr,
    ast.Call, ast.Attribute, ast.Name, ast.Constant, ast.expr_context,
)  # fmt: skip


@dataclass(eq=False)
class _Value:
    """Stands in for a tensor: x; f, made of x by these submodules; x + f; or what the submodule `last` makes of that."""

    calls: tuple[str, ...] = ()
    sum: str = ""  # how x was added: "+" or "+="
    last: str = ""

    def __add__(self, other: Any) -> _Value:
        if not isinstance(other, _Value) or self.sum or other.sum or bool(self.calls) == bool(other.calls):
            raise TypeError("not a sum of x and f")
        return _Value(self.calls or other.calls, "+")

    def __iadd__(self, other: Any) -> _Value:
        self + other  # of x itself, which is written to then, the calls do not become f
        self.sum = "+="
        return self


class _Self:
    """Stands in for a block: its attributes are what `see` makes of their names. Code that is followed names none with "__"."""

    def __init__(self, see: Callable[[str], Any]) -> None:
        self.__dict__["__see__"] = see

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["__see__"](name)


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
    value = _traced(block, cls or type(block))
    if value is None or not value.last:
        return None
    if not is_plain(getattr(block, value.last), nn.ReLU) or not _only_reads(getattr(block, value.calls[0])):
        return None
    if value.sum == "+=" and any(m._forward_hooks for m in getattr(block, value.calls[-1]).modules()):
        return None  # a hook that keeps f sees the sum written over it
    return _branch(value.calls, value.sum)


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


def _traced(block: nn.Module, cls: type[Any]) -> _Value | None:
    """What forward(x) returns, if that is all that it does."""
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        return None
    called: list[str] = []
    missing = object()

    def call(name: str, value: _Value) -> _Value:
        if not isinstance(value, _Value) or value.last:
            raise TypeError("not a chain of submodules")
        called.append(name)
        return _Value(value.calls, value.sum, name) if value.sum else _Value((*value.calls, name))

    def see(name: str) -> Any:
        of_class = getattr(cls, name, missing)
        if isinstance(of_class, FunctionType) and name not in block.__dict__:
            if not _followed(of_class):
                raise TypeError("a method that is not followed")
            return partial(of_class, this)
        part = getattr(block, name) if of_class is missing else missing
        if part is None:
            return None
        if not isinstance(part, nn.Module):
            raise TypeError("neither a method nor a submodule")
        return _same if isinstance(part, nn.Identity) and is_plain(part, nn.Identity) else partial(call, name)

    this = _Self(see)
    try:
        value = see("forward")(_Value())
    except (AttributeError, NameError, RecursionError, TypeError):
        return None
    whole = isinstance(value, _Value) and called == [*value.calls, *filter(None, [value.last])]
    return value if whole else None


def _same(value: Any) -> Any:
    return value


_known: WeakKeyDictionary[FunctionType, tuple[CodeType, bool]] = WeakKeyDictionary()


def _followed(function: FunctionType) -> bool:
    """Whether a method does nothing but call attributes of self, add its tensors, and compare with None."""
    code = function.__code__
    known = _known.get(function)
    if known is None or known[0] is not code:  # notebooks that reload put other code into the same function
        known = _known[function] = code, _only_adds_and_calls(code)
    return known[1] and not function.__defaults__


def _only_adds_and_calls(code: CodeType) -> bool:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
        consts = compile(ast.Module([tree], []), "", "exec").co_consts
    except (OSError, SyntaxError, TypeError, ValueError):
        return False
    compiled = next((const for const in consts if isinstance(const, CodeType)), None)
    others = code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if not isinstance(tree, ast.FunctionDef) or compiled is None or others or code.co_varnames[:1] != ("self",):
        return False
    for part in ("co_code", "co_names", "co_varnames", "co_consts"):
        if getattr(compiled, part) != getattr(code, part):
            return False  # the file was changed since it was imported
    return all(_allowed(node, code.co_varnames) for line in tree.body for node in ast.walk(line))


def _allowed(node: ast.AST, tensors: tuple[str, ...]) -> bool:
    match node:
        case ast.Name(name, how):
            return name in tensors and (name != "self" or isinstance(how, ast.Load))
        case ast.Attribute(ast.Name("self"), name, ast.Load()):
            return not name.startswith("__")
        case ast.If(test) | ast.IfExp(test):
            return isinstance(test, ast.Compare)
        case ast.Compare(_, _, others):
            return all(isinstance(other, ast.Constant) and other.value is None for other in others)
    return isinstance(node, _ALLOWED) and not isinstance(node, ast.Attribute)


def _only_reads(module: Any) -> bool:
    """Whether a module is known not to write to its input, nor to return a view of it."""
    if is_plain(module, *_READERS):
        return True
    if is_plain(module, nn.Sequential):
        return len(module) > 0 and _only_reads(module[0])
    value = _traced(module, type(module)) if is_plain(module, type(module)) else None
    return value is not None and bool(value.calls) and _only_reads(getattr(module, value.calls[0]))


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
