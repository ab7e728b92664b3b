"""Where a layer adds something to x: its forward, read.

    residual = hidden_states                                    # x
    hidden_states = self.mlp(self.norm(hidden_states))          # made of x
    hidden_states = residual + hidden_states                    # a sum with x, which is x from here on
    return hidden_states

The statements are followed from the first to the last, and of each name it is noted whether it holds x, something made of x, or
something from before the last sum. A layer goes from one sum to the next if it returns the last sum and uses nothing from before a sum
after it. Questions to the layer itself, `if self.norm_first`, are answered first; what it answered is noted.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

X, SHAPED, MADE, BEFORE = "x", "x in another shape", "made of x", "from before the last sum"
SUM, SHAPED_SUM, TUPLE = "a sum", "a sum in another shape", "a tuple that begins with x or a sum"
"""What is known of a value."""
Known = dict[str, str]
"""What is known of names; nothing: ""."""
_SAME = {"contiguous", "clamp"}
_SHAPES = {"reshape", "view", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze"}
"""Methods and functions of tensors that give x back: bounded at most, or in another shape."""
_ASK = {"shape", "size", "dim", "ndim", "dtype", "device", "is_nested", "requires_grad", "is_cuda"}
"""What is asked of a tensor besides its values."""
_FUSED = "_transformer_encoder_layer_fwd"
"""PyTorch's kernel for a whole layer in evaluation. A layer in parts takes the other way, with the same values up to rounding."""
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_BIND_NOTHING = (ast.Assert, ast.Delete, ast.Expr, ast.Pass)
_UNUSUAL = (ast.NamedExpr, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await)
_MISSING, _OTHER = object(), object()


class Whole(ValueError):
    """Why a layer is left whole."""


class Sums:
    """The statements of a layer's forward, and which of them are sums with x.

    Attributes:
        body: the statements, without those for other layers of the class.
        names: of the statements that are sums, by their identity, the name that then is x.
        shaped: those of them in which x has another shape.
        asked: what the layer answered.
    """

    def __init__(self, block: nn.Module, function: FunctionType, this: str, x: str) -> None:
        self.block = block
        self.this = this
        self.asked: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.shaped: set[int] = set()
        self.fused = False
        body = self._answered(definition(function).body)
        self.body = _without_unread(body) if self.fused else body
        if self._follow(self.body, {x: X}) is not None:
            raise Whole("it ends without a return")

    def in_it(self, line: ast.stmt) -> bool:
        """Whether there is a sum in a statement, or what it returns may be one."""
        returned = (node for node in ast.walk(line) if isinstance(node, ast.Return))
        adds = any(isinstance(node, ast.BinOp) for each in returned for node in ast.walk(each))
        return adds or any(id(node) in self.names for node in ast.walk(line))

    def _answered(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements, without questions to the layer itself."""
        found: list[ast.stmt] = []
        for line in body:
            if not isinstance(line, ast.If):
                found.append(line)
                continue
            fused = any(isinstance(node, ast.Attribute) and node.attr == _FUSED for node in ast.walk(line))
            self.fused |= fused
            answer = False if fused else self._answer(line.test)
            if answer is None:
                then, otherwise = self._answered(line.body), self._answered(line.orelse)
                found.append(ast.copy_location(ast.If(line.test, then or [ast.Pass()], otherwise), line))
            else:
                found += self._answered(line.body if answer else line.orelse)
        return found

    def _answer(self, test: ast.expr) -> bool | None:
        """The answer of the layer, if it is one for all calls."""
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                answer = self._answer(operand)
                return None if answer is None else not answer
            case ast.BoolOp(how, values):
                answers = [self._answer(value) for value in values]
                enough = isinstance(how, ast.Or)
                if enough in answers:
                    return enough
                return None if None in answers else not enough
            case ast.Call(ast.Name("hasattr"), [ast.Name(this), ast.Constant(str(name))]) if this == self.this:
                return self._ask(name) is not _MISSING
            case ast.Attribute(ast.Name(this), name) if this == self.this:
                value = self._ask(name)
                return None if value in (_MISSING, _OTHER) else bool(value)
            case ast.Compare(ast.Attribute(ast.Name(this), name), [how], [ast.Constant(other)]) if this == self.this:
                value, compare = self._ask(name), _COMPARE.get(type(how))
                numbers = isinstance(value, int | float) and isinstance(other, int | float)
                comparable = numbers or value is None or other is None or type(value) is type(other)
                return bool(compare(value, other)) if compare and comparable and value is not _MISSING else None
        return None

    def _ask(self, name: str) -> Any:
        if name == "training":
            return _OTHER
        self.asked[name] = answer_of(self.block, name)
        return self.asked[name]

    def _follow(self, body: list[ast.stmt], known: Known) -> Known | None:
        """What names hold after these statements; None if they always return. Notes the sums."""
        for line in body:
            match line:
                case ast.If(test, then, otherwise):
                    _refuse_before(test, known)
                    both = [self._follow(way, dict(known)) for way in (then, otherwise)]
                    ways = [way for way in both if way is not None]
                    if not ways:
                        return None
                    known = {name: _either([way.get(name, "") for way in ways]) for way in ways for name in way}
                case ast.Return(value):
                    kind = "" if value is None else self._kind(value, known)
                    if kind in ("", MADE):
                        raise Whole("what it returns is not known to be a sum with x")
                    return None
                case ast.Raise():
                    return None
                case ast.Assign(targets, value):
                    self._bind(line, targets, self._kind(value, known), known)
                case ast.AnnAssign(target, _, value) if value is not None:
                    self._bind(line, [target], self._kind(value, known), known)
                case ast.AugAssign(target, how, value):
                    before = ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target
                    self._bind(line, [target], self._kind(ast.BinOp(before, how, value), known), known)
                case _:  # in a loop or a function nothing is followed
                    if any(isinstance(node, ast.Return) for node in ast.walk(line)):
                        raise Whole(f"it returns from inside of a {type(line).__name__.lower()}")
                    _refuse_before(line, known)
                    if not isinstance(line, _BIND_NOTHING):
                        self._bind(line, list(names([line], ast.Store)), MADE if _values(line, known) else "", known)
        return known

    def _bind(self, line: ast.stmt, targets: Sequence[ast.expr], kind: str, known: Known) -> None:
        """A value of this kind is given these names, or put into what they name."""
        if kind in (SUM, SHAPED_SUM):
            if len(targets) != 1 or not isinstance(targets[0], ast.Name):
                raise Whole("a sum with x has several names")
            known.update({name: BEFORE for name, was in known.items() if was})
            self.names[id(line)] = targets[0].id
            if kind == SHAPED_SUM:
                self.shaped.add(id(line))
            kind = X if kind == SUM else SHAPED
        for target in targets:
            if isinstance(target, ast.Name):
                known[target.id] = kind
                continue
            for node in names([target], ast.Store):
                known[node.id] = MADE if kind else ""
            for node in names([target], ast.Load):  # of x[0] = …
                if kind or known.get(node.id):
                    known[node.id] = MADE

    def _kind(self, value: ast.expr, known: Known) -> str:
        match value:
            case ast.Name(name) if known.get(name) != BEFORE:
                return known.get(name, "")
            case ast.BinOp(left, ast.Add(), right):
                kinds = [self._kind(left, known)]
                if kinds[0] == TUPLE:
                    return TUPLE
                kinds.append(self._kind(right, known))
                if SHAPED in kinds or SHAPED_SUM in kinds:
                    return SHAPED_SUM
                if X in kinds or SUM in kinds:
                    return SUM
            case ast.Call(ast.Attribute(of, name), given) if name in _SAME | _SHAPES:
                function = isinstance(of, ast.Name) and of.id == "torch" and given
                kind = self._kind(given[0] if function else of, known)
                if kind in (X, SUM, SHAPED, SHAPED_SUM):
                    return kind if name in _SAME else SHAPED if kind in (X, SHAPED) else SHAPED_SUM
            case ast.Tuple([first, *_]):
                if self._kind(first, known) not in ("", MADE):
                    return TUPLE
        _refuse_before(value, known)
        return MADE if _values(value, known) else ""


def answer_of(block: nn.Module, name: str) -> Any:
    """What a layer has under this name, as far as questions to it can be answered once and for all."""
    value = getattr(block, name, _MISSING)
    return value if value is _MISSING or value is None or isinstance(value, bool | int | float | str) else _OTHER


def _either(kinds: list[str]) -> str:
    """What is known of a name that two ways lead to."""
    if BEFORE in kinds:
        return BEFORE
    return kinds[0] if len(set(kinds)) == 1 else MADE


def _values(part: ast.AST, known: Known) -> set[str]:
    """Names with something of x that this reads the values of."""
    asked = {id(node.value) for node in ast.walk(part) if isinstance(node, ast.Attribute) and node.attr in _ASK}
    return {node.id for node in names([part], ast.Load) if known.get(node.id) and id(node) not in asked}


def _refuse_before(part: ast.AST, known: Known) -> None:
    name = next((name for name in sorted(_values(part, known)) if known[name] == BEFORE), None)
    if name is not None:
        raise Whole(f"{name!r} is made before a sum with x and used after it")


def names(body: Sequence[ast.AST], how: type[ast.expr_context]) -> Iterator[ast.Name]:
    """The names that these statements read, or bind."""
    for line in body:
        for node in ast.walk(line):
            if isinstance(node, ast.Name) and isinstance(node.ctx, how):
                yield node


def read_before(body: list[ast.stmt], after: set[str]) -> set[str]:
    """Names that these statements may read before they bind them, or that are read after them."""
    live = set(after)
    for line in reversed(body):
        read = {node.id for node in names([line], ast.Load)}
        match line:
            case ast.Return() | ast.Raise():
                live = read
            case ast.If(test, then, otherwise):
                read = {node.id for node in names([test], ast.Load)}
                live = read | read_before(then, live) | read_before(otherwise, live)
            case ast.Assign(targets):
                live = live - {node.id for node in names(targets, ast.Store)} | read
            case ast.AugAssign(ast.Name(name)):
                live |= read | {name}
            case _:
                live |= read
    return live


def _without_unread(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without those that only give names to what is not read afterwards: reasons for or against `_FUSED`."""
    live: set[str] = set()
    found: list[ast.stmt] = []
    for line in reversed(body):
        bound = {node.id for node in names([line], ast.Store)}
        ends = any(isinstance(node, ast.Return | ast.Raise) for node in ast.walk(line))
        if ends or not bound or bound & live or not isinstance(line, ast.Assign | ast.If):
            found.insert(0, line)
            live = read_before([line], live)
    return found


def definition(function: FunctionType) -> ast.FunctionDef:
    """The source of a function, which must be what it runs."""
    code = function.__code__
    try:
        definitions, codes = _parsed("".join(inspect.findsource(code)[0]))
    except (OSError, SyntaxError, TypeError) as error:
        raise Whole("the source of its forward cannot be read") from error
    place = code.co_firstlineno, code.co_name
    found = definitions.get(place)
    if found is None or not _same(codes[place], code):
        raise Whole("the source of its forward is not what runs: was the file changed since it was imported?")
    if code.co_freevars or any(isinstance(node, _UNUSUAL) for node in ast.walk(found)):
        raise Whole("its forward is no plain function")
    return found


_Place = tuple[int, str]


@lru_cache(8)
def _parsed(text: str) -> tuple[dict[_Place, ast.FunctionDef], dict[_Place, CodeType]]:
    """The functions of a file, and what they are compiled to, by line and name (its imports change how calls compile)."""
    tree = ast.parse(text)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    definitions = {(min([node.lineno, *(n.lineno for n in node.decorator_list)]), node.name): node for node in found}
    codes: dict[_Place, CodeType] = {}
    todo = [compile(tree, "", "exec", dont_inherit=True)]
    while todo:
        inner = [const for const in todo.pop().co_consts if isinstance(const, CodeType)]
        codes.update({(code.co_firstlineno, code.co_name): code for code in inner})
        todo += inner
    return definitions, codes


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two functions run the same."""
    if len(one.co_consts) != len(other.co_consts):
        return False
    for a, b in zip(one.co_consts, other.co_consts, strict=True):
        same = _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a == b
        if not same:
            return False
    return (one.co_code, one.co_names, one.co_varnames) == (other.co_code, other.co_names, other.co_varnames)
