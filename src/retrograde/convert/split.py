"""A layer in parts, cut at its residual sums: attention and MLP as two steps, each a residual block of its own.

    hidden_states = residual + self.self_attn(self.input_layernorm(hidden_states))          # the first part ends here
    residual = hidden_states                                                                # the second begins
    hidden_states = residual + self.mlp(self.post_attention_layernorm(hidden_states))
    return hidden_states

Each part is a function made of the layer's own statements. So it calls the layer's own submodules, with their hooks, and one after the
other the parts compute what the layer computes. What a part needs besides x (masks, a cache, a shape that was read before) is what the
layer was called with, or what the part before has at its end.

A layer is cut at every sum with x that another sum comes after (`sums`). It is left whole where that would not give residual blocks: if
it adds attention and MLP to x in one sum, normalises a sum, or uses something from before a sum after it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .sums import Sums, Whole, answer_of, definition, names, read_before

_CHANGE = {"pop", "popitem", "update", "setdefault", "clear"}
_MARK = "retrograde_cut"


class Cut(NamedTuple):
    """Where a part ends: x there, which part goes on, and what that needs of what was bound since the layer was called."""

    x: Tensor
    to: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    """One part of a layer.

    Attributes:
        run: run(block, x, *values, **rest) returns a `Cut`, or what the layer returns.
        needs: the names of the values.
        carried: those of them that the part before has at its end.
        rest: the name of the layer's **kwargs, if the part needs those.
        uses: what it uses of the layer, the submodules that it may run among them; None: perhaps everything.
    """

    run: Callable[..., Any]
    needs: tuple[str, ...]
    carried: tuple[str, ...]
    rest: str
    uses: tuple[str, ...] | None


Take = Callable[[int, Part, Tensor, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Parts:
    """A layer in parts. `asked`: what the layer answered when it was cut; `steps`: how many of the parts follow one another."""

    parts: tuple[Part, ...]
    steps: int
    signature: inspect.Signature
    asked: dict[str, Any]

    def holds(self, block: nn.Module) -> bool:
        """Whether the layer would answer the same."""
        return all(answer_of(block, name) == was for name, was in self.asked.items())

    def walk(self, take: Take, block: nn.Module, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the layer returns, where `take` runs its parts one after the other."""
        values, rest = self._given(block, x, args, kwargs)
        part = self.parts[0]
        for k in range(self.steps):
            out = take(k, part, x, tuple(values[name] for name in part.needs), rest if part.rest else {})
            if type(out) is not Cut:
                break
            part, x = self.parts[out.to], out.x
            values.update(zip(part.carried, out.values, strict=True))
        return out

    def _given(
        self, block: nn.Module, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the layer is given, by the names of its parameters, and what it is given besides."""
        parameters = list(self.signature.parameters.values())[2:]
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        values = {p.name: p.default for p in parameters if p.default is not p.empty}
        values.update(zip(known, args))  # noqa: B905 - not every parameter is given by its place
        values.update({name: value for name, value in kwargs.items() if name in known})
        rest = {name: value for name, value in kwargs.items() if name not in known}
        if (
            rest
            or len(values) < len(known)
            or len(args) > len(known)
            or not kwargs.keys().isdisjoint(known[: len(args)])
        ):
            self.signature.bind(block, x, *args, **kwargs)  # raises as a call would
        return values, rest


_known: WeakKeyDictionary[type[nn.Module], tuple[CodeType, list[Parts]]] = WeakKeyDictionary()


def parts_of(block: nn.Module, cls: type[nn.Module] | None = None) -> Parts:
    """The parts of a layer, as it is now.

    Args:
        cls: the class whose forward the layer runs; None: its own.

    Raises:
        Whole: it cannot be cut; why.

    >>> len(parts_of(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)).parts)
    2
    """
    cls = cls or type(block)
    function = _function(cls)
    code, found = _known.get(cls, (None, []))
    if code is not function.__code__:  # notebooks that reload put other code into the same function
        found = []
        _known[cls] = function.__code__, found
    parts = next((parts for parts in found if parts.holds(block)), None)
    if parts is None:
        parts = _Cutter(block, function, cls).parts()
        found.append(parts)
    return parts


def parts_now(block: nn.Module, cls: type[nn.Module], steps: int, path: str) -> Parts:
    """The parts of a converted layer; raise if they are others than when it was converted."""
    again = "rg.revert(model) and rg.convert it again after such a change."
    try:
        parts = parts_of(block, cls)
    except Whole as why:
        raise RuntimeError(f"{path} was split when it was converted, and cannot be any more: {why}. {again}") from why
    if parts.steps != steps:
        raise RuntimeError(f"{path} was {steps} steps when it was converted, and is {parts.steps} now. {again}")
    return parts


def steps_of(block: nn.Module) -> tuple[int, str]:
    """How many steps a layer is, and why it is left whole if it is."""
    try:
        return parts_of(block).steps, ""
    except Whole as why:
        return 1, f"{type(block).__name__}: {why}"


def _function(cls: type[nn.Module]) -> FunctionType:
    """The forward of a class, without a decorator of transformers that renames arguments."""
    forward: Any = cls.forward
    while getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        forward = forward.__wrapped__
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        raise Whole("its forward is wrapped by a decorator")
    return forward


class _Cutter:
    """Makes the parts of a layer."""

    def __init__(self, block: nn.Module, function: FunctionType, cls: type[nn.Module]) -> None:
        self.function = function
        self.cls = cls
        self.signature = inspect.signature(function)
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        if inspect.Parameter.VAR_POSITIONAL in kinds.values() or len(kinds) < 2:
            raise Whole("its forward does not name its input")
        self.this, self.x = list(kinds)[:2]
        self.rest = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), "")
        self.sums = Sums(block, function, self.this, self.x)
        self.cuts: list[tuple[ast.stmt, list[ast.stmt]]] = []  # with the statements after them
        self._collect(self.sums.body, [])
        if not self.cuts:
            raise Whole("it does not add to x twice, one after the other")
        self.bodies = [self.sums.body, *(after for _, after in self.cuts)]
        self.bound = {node.id for body in self.bodies for node in names(body, ast.Store)}
        self.made: dict[int, Part] = {}
        self.depth: dict[int, int] = {}

    def parts(self) -> Parts:
        order = range(len(self.bodies))
        for k in reversed(order):  # a part must know what those after it need
            self._make(k, self.bodies[k])
        return Parts(tuple(self.made[k] for k in order), self.depth[0], self.signature, self.sums.asked)

    def _collect(self, body: list[ast.stmt], rest: list[ast.stmt]) -> None:
        """Note the sums that another sum comes after."""
        for k, line in enumerate(body):
            after = body[k + 1 :] + rest
            if isinstance(line, ast.If):
                self._collect(line.body, after)
                self._collect(line.orelse, after)
            elif id(line) in self.sums.names and any(map(self.sums.in_it, after)):
                if id(line) in self.sums.shaped:
                    raise Whole("it adds to x in another shape")
                self.cuts.append((line, after))

    def _make(self, k: int, body: list[ast.stmt]) -> None:
        """Part k, which begins with these statements."""
        ends = {id(line): to for to, (line, _) in enumerate(self.cuts, 1)}
        reached: list[int] = []

        def until_cuts(lines: list[ast.stmt]) -> list[ast.stmt]:
            found: list[ast.stmt] = []
            for line in lines:
                if id(line) in ends:
                    reached.append(ends[id(line)])
                    return [*found, line, self._return(line, ends[id(line)])]
                if isinstance(line, ast.If) and any(id(node) in ends for node in ast.walk(line)):
                    line = ast.copy_location(ast.If(line.test, until_cuts(line.body), until_cuts(line.orelse)), line)
                found.append(line)
            return found

        lines = until_cuts(body)
        code = self.function.__code__
        x = self.sums.names[id(self.cuts[k - 1][0])] if k else self.x
        read = read_before(lines, set()) & set(code.co_varnames) - {x, self.this}
        rest = self.rest if self.rest in read else ""
        if rest and k and (rest in self.bound or _changes(rest, self.sums.body)):
            raise Whole(f"it changes its **{rest}")
        read.discard(rest)
        needs = sorted(read, key=code.co_varnames.index)
        if not k:  # a name that is not bound on every way to a cut
            unbound = [name for name in needs if name not in self.signature.parameters]
            needs = [name for name in needs if name not in unbound]
            lines = [
                _at(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)), body[0]) for name in unbound
            ] + lines
        arguments = ast.arguments(
            [ast.arg(name) for name in (self.this, x, *needs)], [], None, [ast.arg(_MARK)], [None],
            ast.arg(rest) if rest else None, [],
        )  # fmt: skip
        made = _at(ast.FunctionDef(code.co_name, arguments, lines, []), body[0])
        made.type_params = []  # from Python 3.12
        module = compile(ast.Module([made], []), code.co_filename, "exec", dont_inherit=True)
        run = FunctionType(next(c for c in module.co_consts if isinstance(c, CodeType)), self.function.__globals__)
        run.__kwdefaults__ = {_MARK: Cut}
        carried = tuple(name for name in needs if k and name in self.bound)
        self.made[k] = Part(run, tuple(needs), carried, rest, self._uses(lines))
        self.depth[k] = 1 + max((self.depth[to] for to in reached), default=0)

    def _return(self, line: ast.stmt, to: int) -> ast.stmt:
        """return Cut(x, to, (what the next part needs,))"""
        values: list[ast.expr] = [ast.Name(name, ast.Load()) for name in self.made[to].carried]
        x = ast.Name(self.sums.names[id(line)], ast.Load())
        given = [x, ast.Constant(to), ast.Tuple(values, ast.Load())]
        return _at(ast.Return(ast.Call(ast.Name(_MARK, ast.Load()), given, [])), line)

    def _uses(self, lines: list[ast.stmt]) -> tuple[str, ...] | None:
        """What these statements use of the layer, themselves or by its methods; None: perhaps everything."""
        found: set[str] = set()
        todo = [(self.this, lines)]
        while todo:
            this, body = todo.pop()
            nodes = [node for line in body for node in ast.walk(line)]
            of = {id(n.value): n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
            for node in names(body, ast.Load):
                name = of.get(id(node))
                if node.id != this or name in found:
                    continue
                method = None if name is None else inspect.getattr_static(self.cls, name, None)
                if name is None or isinstance(method, property | staticmethod | classmethod):
                    return None
                if isinstance(method, FunctionType):
                    try:
                        todo.append((method.__code__.co_varnames[0], definition(method).body))
                    except Whole:
                        return None
                found.add(name)
        return tuple(sorted(found))


def _changes(name: str, body: list[ast.stmt]) -> bool:
    """Whether these statements put something into this dictionary, or take something out."""
    for line in body:
        for node in ast.walk(line):
            match node:
                case ast.Attribute(ast.Name(of), method) if of == name and method in _CHANGE:
                    return True
                case ast.Subscript(ast.Name(of), _, ast.Store() | ast.Del()) if of == name:
                    return True
    return False


def _at(node: Any, line: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(node, line))
