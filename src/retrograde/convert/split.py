"""A layer's own forward, cut at its residual sums: attention and MLP as two steps, each a residual block of its own.

    hidden_states = residual + self.self_attn(self.input_layernorm(hidden_states))          # the first step ends here
    residual = hidden_states                                                                # the second begins
    hidden_states = residual + self.mlp(self.post_attention_layernorm(hidden_states))
    return hidden_states

Each part is a function made of the layer's own statements, so it calls the layer's own submodules, with their hooks, and one after the
other they compute what the layer computes. What a part needs besides x (masks, a cache, a shape that was read before) is what the layer
was called with, or what the part before has at its end.

Where to cut is read in the source. Names that hold x are followed through the statements, and a sum of x and something is a place to
cut if another sum comes after it. A layer is left whole if it is not known to go from one sum to the next: if it normalises a sum, uses
what was made before a sum after it (attention and MLP side by side), or returns anything but the last sum. Questions to the layer
itself, `if self.norm_first`, are answered when it is cut, and asked again at each call.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

X, SUM, TUPLE, MADE, BEFORE = "x", "a sum", "a tuple that begins with x", "made of x", "from before the last sum"
"""What is known of a value."""
_KEEP = {
    "reshape",
    "view",
    "flatten",
    "unflatten",
    "transpose",
    "permute",
    "contiguous",
    "clamp",
    "squeeze",
    "unsqueeze",
}
"""Methods and functions of tensors that give x back: in another shape, or bounded."""
_ASK = {"shape", "size", "dim", "ndim", "dtype", "device", "is_nested", "requires_grad", "is_cuda"}
"""What is asked of a tensor besides its values."""
_CHANGE = {"pop", "popitem", "update", "setdefault", "clear"}
_FUSED = "_transformer_encoder_layer_fwd"
"""PyTorch's kernel for a whole layer in evaluation. A layer that is cut takes the other way, with the same values up to rounding."""
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_PLAIN = (ast.Assert, ast.Delete, ast.Expr, ast.Import, ast.ImportFrom, ast.Pass, ast.Raise)
_UNUSUAL = (ast.NamedExpr, ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await)
_MARK = "retrograde_cut"


class Whole(ValueError):
    """Why a layer is left whole."""


class Cut(NamedTuple):
    """Where a part ends: x there, which part goes on, and what it needs that was bound since the layer was called."""

    x: Tensor
    to: int
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    """One part of a layer: run(block, x, *values) returns a `Cut`, or what the layer returns."""

    run: Callable[..., Any]
    needs: tuple[str, ...]
    carried: tuple[str, ...]  # those of them that the part before has at its end
    rest: str  # the name of **kwargs, if it needs those
    children: tuple[str, ...] | None  # submodules that it may call; None: any


@dataclass(frozen=True)
class Parts:
    """A layer in parts. `asked`: what the layer answered when it was cut."""

    parts: tuple[Part, ...]
    steps: int
    signature: inspect.Signature
    asked: dict[str, Any]

    def holds(self, block: nn.Module) -> bool:
        """Whether the layer would answer the same."""
        return all(_answer(block, name) == was for name, was in self.asked.items())

    def walk(
        self, take: Callable[[int, Part, Tensor, tuple[Any, ...], dict[str, Any]], Any], block: nn.Module, x: Tensor,
        args: Sequence[Any], kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """What the layer returns, where `take` runs its parts one after the other."""
        bound = self.signature.bind(block, x, *args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        part = self.parts[0]
        for k in range(self.steps):
            given = tuple(values[name] for name in part.needs)
            out = take(k, part, x, given, values[part.rest] if part.rest else {})
            if type(out) is not Cut:
                break
            part, x = self.parts[out.to], out.x
            values.update(zip(part.carried, out.values, strict=True))
        return out


_known: WeakKeyDictionary[FunctionType, tuple[CodeType, list[Parts]]] = WeakKeyDictionary()


def parts_of(block: nn.Module, cls: type[nn.Module] | None = None) -> Parts:
    """The parts of a layer, as it is now.

    Args:
        cls: the class whose forward the layer runs; None: its own.

    Raises:
        Whole: it cannot be cut; why.

    >>> len(parts_of(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)).parts)
    2
    """
    function = _function(cls or type(block))
    code, found = _known.get(function, (None, []))
    if code is not function.__code__:  # notebooks that reload put other code into the same function
        found = []
        _known[function] = function.__code__, found
    known = next((parts for parts in found if parts.holds(block)), None)
    if known is None:
        known = _Cutter(block, function, cls or type(block)).parts()
        found.append(known)
    return known


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
    """Reads and cuts the forward of a layer."""

    def __init__(self, block: nn.Module, function: FunctionType, cls: type[nn.Module]) -> None:
        self.block = block
        self.function = function
        self.cls = cls
        self.asked: dict[str, Any] = {}
        self.sums: dict[int, str] = {}  # statements that are sums, and the name that then is x
        self.returned = False  # whether a sum is returned as it is made
        self.cuts: list[tuple[ast.stmt, list[ast.stmt]]] = []  # with what comes after

    def parts(self) -> Parts:
        self.signature = inspect.signature(self.function)
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        if inspect.Parameter.VAR_POSITIONAL in kinds.values():
            raise Whole("its forward takes *args")
        self.this, self.x = list(kinds)[:2]
        self.rest = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), "")
        body = self._answered(_definition(self.function).body)
        if self._follow(body, {self.x: X}) is not None:
            raise Whole("it ends without a return")
        self._collect(body, [])
        if not self.cuts:
            raise Whole("it adds to x only once" if self.sums or self.returned else "no sum with x was found")
        bodies = [body, *(after for _, after in self.cuts)]
        self.stored = {node.id for part in bodies for node in _names(part, ast.Store)}
        self.made: dict[int, Part] = {}
        self.depth: dict[int, int] = {}
        for k in reversed(range(len(bodies))):
            self._make(k, bodies[k])
        return Parts(tuple(self.made[k] for k in range(len(bodies))), self.depth[0], self.signature, self.asked)

    # which statements there are ------------------------------------------------------------------------------------

    def _answered(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements, without questions to the layer itself."""
        found: list[ast.stmt] = []
        for line in body:
            if not isinstance(line, ast.If):
                found.append(line)
                continue
            fused = any(isinstance(node, ast.Attribute) and node.attr == _FUSED for node in ast.walk(line))
            answer = False if fused else self._static(line.test)
            if answer is None:
                then, otherwise = self._answered(line.body), self._answered(line.orelse)
                found.append(ast.copy_location(ast.If(line.test, then or [ast.Pass()], otherwise), line))
            else:
                found += self._answered(line.body if answer else line.orelse)
        return found

    def _static(self, test: ast.expr) -> bool | None:
        """The answer of the layer, if it is one for all calls."""
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                answer = self._static(operand)
                return None if answer is None else not answer
            case ast.BoolOp(how, values):
                answers = [self._static(value) for value in values]
                ends = isinstance(how, ast.Or)
                return ends if ends in answers else None if None in answers else not ends
            case ast.Call(ast.Name("hasattr"), [ast.Name(this), ast.Constant(str(name))]) if this == self.this:
                return self._ask(name) is not _MISSING
            case ast.Attribute(ast.Name(this), name) if this == self.this:
                answer = self._ask(name)
                return None if answer in (_MISSING, _OTHER) else bool(answer)
            case ast.Compare(ast.Attribute(ast.Name(this), name), [how], [ast.Constant(value)]) if this == self.this:
                answer = self._ask(name)
                compare = _COMPARE.get(type(how))
                numbers = isinstance(answer, int | float) and isinstance(value, int | float)
                known = numbers or value is None or answer is None or type(answer) is type(value)
                if answer is _MISSING or compare is None or not known:
                    return None
                return bool(compare(answer, value))
        return None

    def _ask(self, name: str) -> Any:
        if name == "training":
            return _OTHER
        self.asked[name] = _answer(self.block, name)
        return self.asked[name]

    # where x is ----------------------------------------------------------------------------------------------------

    def _follow(self, body: list[ast.stmt], known: dict[str, str]) -> dict[str, str] | None:
        """What names hold after these statements; None if they always return. Notes the sums."""
        for line in body:
            match line:
                case ast.If(test, then, otherwise):
                    self._refuse_before(test, known)
                    ways = [self._follow(way, dict(known)) for way in (then, otherwise)]
                    left = [way for way in ways if way is not None]
                    if not left:
                        return None
                    known = {name: _either([way.get(name) for way in left]) for way in left for name in way}
                case ast.Return(value):
                    kind = None if value is None else self._kind(value, known)
                    if kind not in (X, SUM, TUPLE):
                        raise Whole("what it returns is not known to be a sum with x")
                    self.returned |= kind == SUM
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
                case _ if isinstance(line, _PLAIN):
                    self._refuse_before(line, known)
                case _:  # a loop, a with, a function: nothing in it is followed
                    if any(isinstance(node, ast.Return) for node in ast.walk(line)):
                        raise Whole(f"it returns from inside of a {type(line).__name__.lower()}")
                    self._refuse_before(line, known)
                    made = MADE if self._mentions(line, known) else None
                    self._bind(line, [node for node in ast.walk(line) if isinstance(node, ast.Name)
                                      and isinstance(node.ctx, ast.Store)], made, known)  # fmt: skip
        return known

    def _bind(self, line: ast.stmt, targets: Sequence[ast.expr], kind: str | None, known: dict[str, str]) -> None:
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        others = [t for t in targets if not isinstance(t, ast.Name)]
        if kind == SUM:
            if len(names) != 1 or others:
                raise Whole("a sum with x has several names")
            for name in known:
                known[name] = BEFORE
            self.sums[id(line)] = names[0]
            kind = X
        inside = [node.id for t in others for node in ast.walk(t) if isinstance(node, ast.Name)]
        stored = [
            node
            for t in others
            for node in ast.walk(t)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        for name in names:
            known[name] = kind or ""
        for name in inside:  # x[0] = …, self.seen = …
            if name in known or name in [node.id for node in stored]:
                known[name] = MADE if kind else known.get(name, "")

    def _kind(self, value: ast.expr, known: dict[str, str]) -> str | None:
        """What is known of a value."""
        match value:
            case ast.Name(name):
                if known.get(name) == BEFORE:
                    self._refuse_before(value, known)
                return known.get(name) or None
            case ast.BinOp(left, ast.Add(), right):
                kinds = [self._kind(left, known)]
                if kinds[0] == TUPLE:
                    return TUPLE
                kinds.append(self._kind(right, known))
                if X in kinds or SUM in kinds:
                    return SUM
            case ast.Call(ast.Attribute(inner, name), given) if name in _KEEP:
                function_of_x = isinstance(inner, ast.Name) and inner.id == "torch" and given
                kind = self._kind(given[0] if function_of_x else inner, known)
                if kind in (X, SUM):
                    return kind
            case ast.Tuple([first, *_]):
                if self._kind(first, known) in (X, SUM):
                    return TUPLE
        self._refuse_before(value, known)
        return MADE if self._mentions(value, known) else None

    def _mentions(self, part: ast.AST, known: dict[str, str]) -> set[str]:
        """Names with something of x that this reads the values of."""
        asked = {id(node.value) for node in ast.walk(part) if isinstance(node, ast.Attribute) and node.attr in _ASK}
        return {
            node.id
            for node in ast.walk(part)
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and known.get(node.id)
            and id(node) not in asked
        }

    def _refuse_before(self, part: ast.AST, known: dict[str, str]) -> None:
        for name in self._mentions(part, known):
            if known[name] == BEFORE:
                raise Whole(f"{name!r} is made before a sum with x and used after it")

    # the parts -----------------------------------------------------------------------------------------------------

    def _collect(self, body: list[ast.stmt], rest: list[ast.stmt]) -> None:
        """Note the sums that another sum comes after."""
        for k, line in enumerate(body):
            after = body[k + 1 :] + rest
            if isinstance(line, ast.If):
                self._collect(line.body, after)
                self._collect(line.orelse, after)
            elif id(line) in self.sums and any(map(self._adds, after)):
                self.cuts.append((line, after))

    def _adds(self, line: ast.stmt) -> bool:
        """Whether there is a sum in a statement, or what is returned may be one."""
        return any(
            id(node) in self.sums
            or (isinstance(node, ast.Return) and any(isinstance(n, ast.BinOp) for n in ast.walk(node)))
            for node in ast.walk(line)
        )

    def _make(self, k: int, body: list[ast.stmt]) -> None:
        """Part k, which begins with these statements."""
        places = {id(line): to for to, (line, _) in enumerate(self.cuts, 1)}
        reached: list[int] = []

        def ended(lines: list[ast.stmt]) -> list[ast.stmt]:
            found: list[ast.stmt] = []
            for line in lines:
                if id(line) in places:
                    to = places[id(line)]
                    reached.append(to)
                    return [*found, line, self._cut(line, to)]
                if isinstance(line, ast.If) and any(id(node) in places for node in ast.walk(line)):
                    line = ast.copy_location(ast.If(line.test, ended(line.body), ended(line.orelse)), line)
                found.append(line)
            return found

        lines = ended(body)
        x = self.sums[id(self.cuts[k - 1][0])] if k else self.x
        known = self.function.__code__.co_varnames
        live = sorted((_live(lines, set()) & set(known)) - {x, self.this}, key=known.index)
        rest = self.rest if self.rest in live else ""
        if rest and k and (rest in self.stored or _changed(self.rest, [line for line, _ in self.cuts] + body)):
            raise Whole(f"it changes its **{rest}")
        parameters = self.signature.parameters
        needs = tuple(name for name in live if name != rest and (k or name in parameters))
        for name in live:  # a name that is not bound on every way to a cut
            if not k and name not in parameters:
                lines.insert(0, _at(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)), body[0]))
        arguments = ast.arguments(
            [ast.arg(name) for name in (self.this, x, *needs)], [], None, [ast.arg(_MARK)], [None],
            ast.arg(rest) if rest else None, [],
        )  # fmt: skip
        definition = ast.FunctionDef(self.function.__name__, arguments, lines, [])
        definition.type_params = []  # type: ignore[attr-defined]  # from Python 3.12
        made = FunctionType(
            _compiled(_at(definition, body[0]), self.function.__code__.co_filename), self.function.__globals__
        )
        made.__kwdefaults__ = {_MARK: Cut}
        carried = tuple(name for name in needs if k and name in self.stored)
        self.made[k] = Part(made, needs, carried, rest, self._children(lines))
        self.depth[k] = 1 + max((self.depth[to] for to in reached), default=0)

    def _cut(self, line: ast.stmt, to: int) -> ast.stmt:
        """return Cut(x, to, (what the next part needs,))"""
        values = [ast.Name(name, ast.Load()) for name in self.made[to].carried]
        x = ast.Name(self.sums[id(line)], ast.Load())
        given: list[ast.expr] = [x, ast.Constant(to), ast.Tuple(list(values), ast.Load())]
        return _at(ast.Return(ast.Call(ast.Name(_MARK, ast.Load()), given, [])), line)

    def _children(self, lines: list[ast.stmt]) -> tuple[str, ...] | None:
        """The submodules that these statements may call, themselves or by methods of the layer; None: any."""
        found: set[str] = set()
        todo: list[tuple[str, list[ast.stmt]]] = [(self.this, lines)]
        while todo:
            this, body = todo.pop()
            nodes = [node for line in body for node in ast.walk(line)]
            of = {id(n.value): n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
            for node in nodes:
                if not isinstance(node, ast.Name) or node.id != this:
                    continue
                name = of.get(id(node))
                if name is None:
                    return None
                method = inspect.getattr_static(self.cls, name, None)
                if name not in found and isinstance(method, FunctionType):
                    try:
                        definition = _definition(method)
                    except Whole:
                        return None
                    todo.append((method.__code__.co_varnames[0], definition.body))
                elif isinstance(method, property | staticmethod | classmethod):
                    return None
                found.add(name)
        return tuple(name for name in self.block._modules if name in found)


_MISSING, _OTHER = "(missing)", "(other)"


def _answer(block: nn.Module, name: str) -> Any:
    """What a layer has under this name, as far as questions to it can be answered once and for all."""
    value = getattr(block, name, _MISSING)
    return value if value is None or isinstance(value, bool | int | float | str) else _OTHER


def _either(kinds: list[str | None]) -> str:
    """What is known of a name that two ways lead to."""
    if BEFORE in kinds:
        return BEFORE
    first = kinds[0] or ""
    return first if all((kind or "") == first for kind in kinds) else MADE


def _names(body: Sequence[ast.AST], how: type[ast.expr_context]) -> Iterator[ast.Name]:
    for line in body:
        for node in ast.walk(line):
            if isinstance(node, ast.Name) and isinstance(node.ctx, how):
                yield node


def _read(*parts: ast.AST | None) -> set[str]:
    return {node.id for node in _names([part for part in parts if part is not None], ast.Load)}


def _live(body: list[ast.stmt], after: set[str]) -> set[str]:
    """Names that these statements may read before they bind them, or that are read after them."""
    live = set(after)
    for line in reversed(body):
        match line:
            case ast.Return() | ast.Raise():
                live = _read(line)
            case ast.If(test, then, otherwise):
                live = _read(test) | _live(then, live) | _live(otherwise, live)
            case ast.Assign(targets, value):
                live = live - {node.id for node in _names(targets, ast.Store)} | _read(value, *targets)
            case ast.AugAssign(ast.Name(name)):
                live |= _read(line) | {name}
            case _:
                live |= _read(line)
    return live


def _changed(name: str, body: list[ast.stmt]) -> bool:
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


def _definition(function: FunctionType) -> ast.FunctionDef:
    """The source of a function, which must be what it runs."""
    code = function.__code__
    try:
        definitions, codes = _parsed("".join(inspect.findsource(code)[0]))
    except (OSError, SyntaxError, TypeError) as error:
        raise Whole("the source of its forward cannot be read") from error
    key = code.co_firstlineno, code.co_name
    definition = definitions.get(key)
    if definition is None or not _same(codes[key], code):
        raise Whole("the source of its forward is not what runs: was the file changed since it was imported?")
    if code.co_freevars or any(isinstance(node, _UNUSUAL) for node in ast.walk(definition)):
        raise Whole("its forward is no plain function")
    return definition


_Place = tuple[int, str]


@lru_cache(8)
def _parsed(text: str) -> tuple[dict[_Place, ast.FunctionDef], dict[_Place, CodeType]]:
    """The functions of a file, and what they are compiled to, by line and name."""
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


def _compiled(definition: ast.FunctionDef, filename: str) -> CodeType:
    module = compile(ast.Module([definition], []), filename, "exec", dont_inherit=True)
    return next(const for const in module.co_consts if isinstance(const, CodeType))


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two functions run the same."""
    if len(one.co_consts) != len(other.co_consts):
        return False
    for a, b in zip(one.co_consts, other.co_consts, strict=True):
        same = _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else a == b
        if not same:
            return False
    return (one.co_code, one.co_names, one.co_varnames) == (other.co_code, other.co_names, other.co_varnames)
