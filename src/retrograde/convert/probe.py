"""Which blocks of a model can run as momentum networks: by a trial.

The model is run once on an example, in grad mode, while autograd keeps nothing. Each call of a module is noted with the edges of
autograd's graph at its input and its output:

    block      same shape and dtype, and a way leads from the output back to the input that meets an addition and no matrix product or
               convolution: the skip connection, whatever normalisations and activations lie on it
    branch     same shape and dtype, no block, and the model adds the output to the input
    a run      blocks that are each given what the one before returned; or branches that are each given the sum before

A module that is nothing but a chain of blocks (an `nn.Sequential` of them) is seen through. Parameters, buffers, gradients and random
numbers are left as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ..memory.fake import mode_of
from ..memory.step import as_call, tensors_of
from ..reverse.changes import all_at_once, exchanged_buffers, memory_of
from .find import Finding, Left, Run, run_of

Edge = tuple[Any, int]
"""What autograd knows a tensor by: the node that made it, and which of its outputs it is."""
_PRODUCTS = ("mm", "conv", "embedding", "scaleddot", "einsum", "matmul", "linear", "cdist")
_SELECTIONS = ("index", "gather", "slice", "flip", "roll")
_MEETING = ("add", "lerp")


@dataclass(eq=False)
class Call:
    """One call of one module."""

    path: str
    module: nn.Module
    x: Edge | None = None
    y: Edge | None = None
    shape: tuple[int, ...] | None = None
    out_shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    form: str | None = None  # "block" or "branch"
    leads_to: Edge | None = None  # the output; of a branch, its sum with the input
    scaled: bool = False  # the model adds a multiple of the output to the input
    inner: list[Call] = field(default_factory=list)

    @property
    def keeps_shape(self) -> bool:
        return self.shape is not None and self.shape == self.out_shape

    def follows(self, other: Call) -> bool:
        """Whether the input is what the other call led to."""
        return self.x == other.leads_to

    def why_not(self) -> str:
        """Why this is no step of a momentum network."""
        if self.shape is None or self.out_shape is None:
            return "does not take and return a tensor"
        if not self.keeps_shape:
            return f"changes the shape of its input, {self.shape} to {self.out_shape}"
        return "follows no other block" if self.form == "block" else "has no skip connection"


def probe(model: nn.Module, example: Any, least: int = 2) -> Finding:
    """The runs of at least this many residual blocks that a call of the model goes through."""
    runs: list[Run] = []
    taken: set[nn.Module] = set()

    def descend(calls: list[Call]) -> None:
        for group in _groups(_seen_through(calls)):
            if group[0].form and len(group) >= least and not any(call.module in taken for call in group):
                taken.update(m for call in group for m in call.module.modules())
                runs.append(run_of([call.path for call in group], group[0].form))
            else:
                for call in group:
                    descend(call.inner)

    calls = record(model, example)
    descend(calls)
    order = {call.path: k for k, call in enumerate(every(calls))}
    runs.sort(key=lambda run: order[run.blocks[0]])
    blocks = {path for run in runs for path in run.blocks}
    kinds = {type(call.module) for call in every(calls) if call.path in blocks} - {nn.Sequential}
    left = []
    for call in every(calls):
        if call.module not in taken and type(call.module) in kinds:
            taken.add(call.module)
            left.append(Left(call.path, call.why_not()))
    return Finding(tuple(runs), tuple(left))


def confirm(model: nn.Module, example: Any, finding: Finding) -> Finding:
    """The named runs, trusted where the trial shows what the blocks compute.

    Raises:
        ValueError: if the blocks do not keep the shape of their input, or do not follow one another.
    """
    first: dict[str, Call] = {}
    for call in every(record(model, example)):
        first.setdefault(call.path, call)
    runs = []
    for run in finding.runs:
        before: Call | None = None
        for path in run.blocks:
            if path not in first:
                raise ValueError(f"stage {run.name!r}: {path} was not called by the model on this example.")
            call = first[path]
            if not call.keeps_shape:
                raise ValueError(
                    f"stage {run.name!r}: {path} {call.why_not()}. Blocks of a momentum network keep it: leave that one out."
                )
            if call.scaled:
                raise ValueError(
                    f"stage {run.name!r}: {path} returns f(x), and the model adds a multiple of it, x + s·f(x). Multiply inside of the "
                    "block: a step of a momentum network adds f(x) as it is."
                )
            if call.form is not None and call.form != run.form:
                does = "x + f(x)" if call.form == "block" else "f(x), which the model adds to x"
                raise ValueError(f"stage {run.name!r}: {path} returns {does}; pass form={call.form!r}.")
            if before is not None and not call.follows(before):
                raise ValueError(
                    f"stage {run.name!r}: {path} is not given what {before.path} led to: the model does something in between. "
                    "Make two stages of it, or leave it out."
                )
            before = call
        runs.append(replace(run, trusted=run.trusted or all(first[path].form for path in run.blocks)))
    return replace(finding, runs=tuple(runs))


def record(model: nn.Module, example: Any) -> list[Call]:
    """The calls that the model makes, each with those inside it."""
    paths = {module: path for path, module in model.named_modules()}
    stack = [Call("", model)]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = Call(paths[module], module)
        x = _main(args, kwargs)
        if x is not None:
            call.x, call.shape, call.dtype = edge_of(x), tuple(x.shape), x.dtype
        stack[-1].inner.append(call)
        stack.append(call)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        call = stack.pop()
        y = _main(out if isinstance(out, tuple | list) else (out,), {})
        if y is not None:
            call.y = call.leads_to = edge_of(y)
            call.out_shape = tuple(y.shape)
            skip = call.keeps_shape and call.dtype == y.dtype and skips(call.y, call.x)
            call.form = "block" if skip else None

    with _tried_out(model), mode_of(model) or nullcontext():  # a model without values makes more tensors without them
        handles = []
        for module in paths:
            if module is not model:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            args, kwargs = as_call(example)
            out = model(*map(_on_graph, args), **{name: _on_graph(value) for name, value in kwargs.items()})
        finally:
            for handle in handles:
                handle.remove()
    sums, scaled = _sums(out)
    for call in every(stack[0].inner):
        ends = frozenset((call.x, call.y))
        if call.form is None and call.keeps_shape and ends in sums:
            call.form, call.leads_to = "branch", sums[ends]
        call.scaled = call.form is None and ends in scaled
    return stack[0].inner


def every(calls: list[Call]) -> Iterator[Call]:
    """These calls and all inside them."""
    for call in calls:
        yield call
        yield from every(call.inner)


def _sums(out: Any) -> tuple[dict[frozenset[Edge | None], Edge], set[frozenset[Edge | None]]]:
    """The sums of two tensors behind an output, by what they add; and the pairs of which one is multiplied before."""
    todo: list[Any] = [t.grad_fn for t in tensors_of(out) if t.grad_fn is not None]
    seen = set(todo)
    sums: dict[frozenset[Edge | None], Edge] = {}
    scaled: set[frozenset[Edge | None]] = set()
    while todo:
        node = todo.pop()
        edges: list[Edge] = [edge for edge in node.next_functions if edge[0] is not None]
        if node.name().startswith("Add") and len(edges) == 2:
            if getattr(node, "_saved_alpha", 1) == 1:
                sums[frozenset(edges)] = (node, 0)
            else:
                scaled.add(frozenset(edges))
            for product, x in (edges, edges[::-1]):
                if product[0].name().startswith(("Mul", "Div")):
                    scaled |= {frozenset((x, factor)) for factor in product[0].next_functions}
        fresh = {parent for parent, _ in edges} - seen
        seen |= fresh
        todo += fresh
    return sums, scaled


def skips(start: Edge | None, goal: Edge | None) -> bool | None:
    """Whether a skip connection leads from the output of a call back to its input.

    None if that cannot be seen: there are no gradients, only a part of the input may be added, or there is an operation of
    somebody's own on the way.

    >>> x = torch.ones(3, requires_grad=True) * 1
    >>> f = x @ torch.ones(3, 3)
    >>> [skips(edge_of(y), edge_of(x)) for y in (x + f, f, x * f, x.detach())]
    [True, False, None, None]
    """
    if start is None or goal is None:
        return None
    todo, seen, unknown = [(start, False)], set(), False
    while todo:
        edge, met = todo.pop()
        node = edge[0]
        if edge == goal and met:
            return True
        if node is None or (edge, met) in seen:
            continue
        seen.add((edge, met))
        name = node.name().lower().replace("_", "")
        selects = any(word in name for word in _SELECTIONS)
        unknown |= edge == goal or selects or re.search(r"backward\d+$|accumulategrad$", name) is None
        if edge == goal or selects or any(word in name for word in _PRODUCTS):
            continue
        summands = [p for p, _ in node.next_functions if p is not None and not p.name().endswith("AccumulateGrad")]
        met |= len(summands) > 1 and any(name.startswith(word) for word in _MEETING)  # not x + 1e-6, nor x + bias
        todo += [(parent, met) for parent in node.next_functions]
    return None if unknown else False


def _seen_through(calls: list[Call]) -> list[Call]:
    """The calls, with chains of blocks in the place of modules that are nothing else."""
    kinds = [type(call.module) for call in calls if call.form == "block"]
    result: list[Call] = []
    for call in calls:
        inner = [c for c in _seen_through(call.inner) if c.form == "block"] if call.form == "block" else []
        chain = len(inner) > 1 and all(b.follows(a) for a, b in pairwise(inner))
        nothing_else = chain and inner[0].x == call.x and inner[-1].y == call.y
        alone = isinstance(call.module, nn.Sequential) or kinds.count(type(call.module)) == 1
        result += inner if nothing_else and alone else [call]
    return result


def _groups(calls: list[Call]) -> list[list[Call]]:
    """Calls of one form that follow one another; every other call by itself."""
    groups: list[list[Call]] = []
    last: list[Call] = []
    for call in calls:
        if call.form is None:
            groups.append([call])
        elif last and call.form == last[-1].form and call.follows(last[-1]):
            last.append(call)
        else:
            last = [call]
            groups.append(last)
    return groups


def _main(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor: a block's x."""
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)


def edge_of(x: Tensor) -> Edge | None:
    """What autograd knows the tensor by; None if it has no gradient, or is a leaf."""
    return None if x.grad_fn is None else (x.grad_fn, x.output_nr)


def _on_graph(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_() * 1
    return value


@contextmanager
def _tried_out(model: nn.Module) -> Iterator[None]:
    """Gradients everywhere, nothing kept for them, nothing left behind."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    exchange, put_back = exchanged_buffers(model.modules())
    written = _Written(model)
    try:
        all_at_once(exchange)
        for p in frozen:
            p.requires_grad_()
        hooks = saved_tensors_hooks(lambda _: None, _not_kept)
        with torch.random.fork_rng(devices), torch.enable_grad(), hooks, written:
            yield
    finally:
        all_at_once(put_back)
        written.put_back()
        for p in frozen:
            p.requires_grad_(False)


class _Written(TorchDispatchMode):
    """Copies a parameter before the first operation that writes to it: momentum encoders move theirs in forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.originals: list[tuple[Any, Tensor]] = [
            (p, p.data) for p in model.parameters() if type(p) is nn.Parameter and not is_lazy(p)
        ]
        self.at: dict[int, list[Tensor]] = {}
        for p, _ in self.originals:
            self.at.setdefault(memory_of(p), []).append(p)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else given.get(argument.name)
                    for t in value if isinstance(value, list | tuple) else [value]:
                        if isinstance(t, Tensor):
                            written = self.at.pop(memory_of(t), ())
                            self.copies += [(p, p.detach().clone()) for p in written]
        return func(*args, **given)

    def put_back(self) -> None:
        for p, data in self.originals:
            if not p.is_set_to(data):  # p.data = …
                p.data = data
        for p, before in self.copies:
            p.data.copy_(before)


def _not_kept(_: Any) -> Tensor:
    raise RuntimeError(
        "the model takes gradients inside its forward pass, so it cannot be tried out. Name its stages instead."
    )
