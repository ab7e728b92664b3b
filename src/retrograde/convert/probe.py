"""Which blocks of a model can run as momentum networks: by trying it out.

The model is run once on an example, in grad mode, while autograd keeps nothing. Every call of a module is noted with the
tensor that went in and the one that came out:

    residual   same shape and dtype, and autograd's graph has a way from the output to the input that meets an addition and
               no matrix product or convolution: the skip connection, whatever normalisations and activations lie on it
    branch     same shape and dtype, not residual, and the model adds the output to the input
    a run      residual calls, each given the very tensor that the one before returned; or branches, each given the sum that
               the one before led to

A module that is nothing but such a chain (an `nn.Sequential` of blocks) is seen through. Parameters, buffers, gradients and
random numbers are left as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..memory.fake import mode_of
from ..memory.step import as_call, tensors_of
from ..stack.aside import copied_buffers
from .find import Finding, Left, Run, run_of

_HEAVY = (
    "mm",
    "conv",
    "embedding",
    "scaleddot",
    "einsum",
    "matmul",
    "linear",
    "cdist",
    "index",
    "gather",
    "slice",
    "flip",
    "roll",
)
_MEETING = ("add", "lerp")


@dataclass(eq=False)
class Node:
    """One call of one module."""

    path: str
    module: nn.Module
    x: weakref.ref[Tensor] | None = None
    y: weakref.ref[Tensor] | None = None
    shape: torch.Size | None = None
    out_shape: torch.Size | None = None
    version: int = 0  # of the output, when it was returned
    form: str | None = None  # "block" or "branch", if it is a residual one
    ends: tuple[Any, Any] = (None, None)  # autograd's nodes of input and output
    sum: Any = None  # autograd's node of their sum
    children: list[Node] = field(default_factory=list)
    continues: Node | None = None  # the call that returned this one's input
    returns: Node | None = None  # the call inside this one whose output this one returns

    @property
    def residual(self) -> bool:
        return self.form == "block"

    def follows(self, other: Node) -> bool:
        """Whether the input is what the other call led to."""
        if self.form == other.form == "branch":
            return self.ends[0] is other.sum
        return self.continues is not None and _last(self.continues) is _last(other)


def _last(node: Node) -> Node:
    while node.returns is not None:
        node = node.returns
    return node


def probe(model: nn.Module, example: Any, least: int = 2) -> Finding:
    """The runs of at least this many residual blocks that a call of the model goes through."""
    runs: list[Run] = []
    taken: set[nn.Module] = set()
    left: list[Left] = []

    def descend(nodes: list[Node]) -> None:
        for group in _groups(_seen_through(nodes)):
            fresh = [node for node in group if node.module not in taken]
            if group[0].form and len(fresh) == len(group) >= least:
                taken.update(m for node in group for m in node.module.modules())
                runs.append(run_of([node.path for node in group], group[0].form))
            else:
                for node in group:
                    descend(node.children)

    calls = record(model, example)
    descend(calls)
    order = {node.path: k for k, node in enumerate(_all(calls))}
    runs.sort(key=lambda run: order[run.blocks[0]])
    blocks = {path for run in runs for path in run.blocks}
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {type(modules[path]) for path in blocks} - {nn.Sequential}
    for node in _all(calls):
        if node.module not in taken and type(node.module) in kinds:
            taken.add(node.module)
            left.append(Left(node.path, _why_not(node), True))
    return Finding(tuple(runs), tuple(left))


def confirm(model: nn.Module, example: Any, finding: Finding) -> None:
    """Raise unless the named blocks keep the shape of their input and follow one another."""
    first: dict[str, Node] = {}
    for node in _all(record(model, example)):
        first.setdefault(node.path, node)
    for run in finding.runs:
        before: Node | None = None
        for path in run.blocks:
            found = first.get(path)
            if found is None:
                raise ValueError(f"stage {run.name!r}: {path} was not called by the model on this example.")
            node = found
            if node.shape is None or node.shape != node.out_shape:
                raise ValueError(
                    f"stage {run.name!r}: {path} {_why_not(node)}. Blocks of a momentum network keep it: leave that one out."
                )
            if node.form is not None and node.form != run.form:
                does = "x + f(x)" if node.residual else "f(x), which the model adds to x"
                raise ValueError(f"stage {run.name!r}: {path} returns {does}; pass form={node.form!r}.")
            if before is not None and not node.follows(before):
                raise ValueError(
                    f"stage {run.name!r}: {path} is not given what {before.path} led to: the model does something in between. "
                    "Make two stages of it, or leave it out."
                )
            before = node


def record(model: nn.Module, example: Any) -> list[Node]:
    """The calls that the model makes, each with those inside it."""
    names = {module: path for path, module in model.named_modules()}
    stack: list[Node] = [Node("", model)]
    made: list[Node] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        node = Node(names[module], module)
        x = _main(args, kwargs)
        if x is not None:
            node.x, node.shape, node.ends = weakref.ref(x), x.shape, (x.grad_fn, None)
            node.continues = next(
                (m for m in reversed(made) if m.y is not None and m.y() is x and m.version == x._version), None
            )
        stack[-1].children.append(node)
        stack.append(node)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        node = stack.pop()
        y = _main(out if isinstance(out, tuple | list) else (out,), {})
        if y is None:
            return
        node.y, node.out_shape, node.version = weakref.ref(y), y.shape, y._version
        node.returns = next((c for c in reversed(node.children) if c.y is not None and c.y() is y), None)
        node.ends = (node.ends[0], y.grad_fn)
        x = None if node.x is None else node.x()
        if node.shape == y.shape and None not in node.ends and (x is None or x.dtype == y.dtype):
            node.form = "block" if _skips(y.grad_fn, node.ends[0]) else None
        made.append(node)

    with (
        _tried_out(model),
        mode_of(model) or nullcontext(),
    ):  # what a model without values makes must be without them, too
        handles = []
        for module in names:
            if module is not model:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
        try:
            args, kwargs = as_call(example)
            out = model(*map(_on_graph, args), **{name: _on_graph(value) for name, value in kwargs.items()})
        finally:
            for handle in handles:
                handle.remove()
    sums = _sums(out)
    for node in made:
        if node.form is None and node.shape == node.out_shape and None not in node.ends:
            node.sum = sums.get(frozenset(node.ends))
            node.form = None if node.sum is None else "branch"
    return stack[0].children


def _sums(out: Any) -> dict[frozenset[Any], Any]:
    """The additions behind an output, by the two nodes they add."""
    todo = [t.grad_fn for t in tensors_of(out) if t.grad_fn is not None]
    seen, sums = set(todo), {}
    while todo:
        node = todo.pop()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if node.name().startswith("Add") and len(parents) == 2:
            sums[frozenset(parents)] = node
        fresh = [parent for parent in parents if parent not in seen]
        seen.update(fresh)
        todo += fresh
    return sums


def _skips(start: Any, goal: Any) -> bool:
    """Whether a skip connection leads from one node of autograd's graph back to another."""
    todo, seen = [(start, False)], set()
    while todo:
        node, met = todo.pop()
        if node is goal and met:
            return True
        if node is None or node is goal or (node, met) in seen:
            continue
        seen.add((node, met))
        name = node.name().lower().replace("_", "")
        if any(heavy in name for heavy in _HEAVY):
            continue
        summands = [p for p, _ in node.next_functions if p is not None and not p.name().endswith("AccumulateGrad")]
        met |= len(summands) > 1 and any(name.startswith(word) for word in _MEETING)  # not x + 1e-6, nor x + bias
        todo += [(parent, met) for parent, _ in node.next_functions]
    return False


def _seen_through(nodes: list[Node]) -> list[Node]:
    """The calls, with chains of residual calls in the place of modules that are nothing else."""
    kinds = [type(node.module) for node in nodes if node.residual]
    result: list[Node] = []
    for node in nodes:
        inner = [child for child in _seen_through(node.children) if child.residual] if node.residual else []
        chain = len(inner) > 1 and all(b.follows(a) for a, b in pairwise(inner))
        whole = chain and _last(node) is _last(inner[-1]) and _same(inner[0].x, node.x)
        alone = isinstance(node.module, nn.Sequential) or kinds.count(type(node.module)) == 1
        result += inner if whole and alone else [node]
    return result


def _same(a: weakref.ref[Tensor] | None, b: weakref.ref[Tensor] | None) -> bool:
    return a is not None and a == b


def _groups(nodes: list[Node]) -> Iterator[list[Node]]:
    """Residual calls that continue one another; every other call by itself."""
    group: list[Node] = []
    for node in nodes:
        if node.form is None:
            yield [node]
        elif group and node.form == group[-1].form and node.follows(group[-1]):
            group.append(node)
        else:
            if group:
                yield group
            group = [node]
    if group:
        yield group


def _all(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.children)


def _why_not(node: Node) -> str:
    if node.shape is None or node.out_shape is None:
        return "does not take and return a tensor"
    if node.shape != node.out_shape:
        return f"changes the shape of its input, {tuple(node.shape)} to {tuple(node.out_shape)}"
    return "follows no other block" if node.residual else "has no skip connection"


def _main(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The first floating-point tensor: a block's x."""
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)


def _on_graph(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_() * 1
    return value


@contextmanager
def _tried_out(model: nn.Module) -> Iterator[None]:
    """Gradients everywhere, nothing kept for them, nothing left behind."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        for p in frozen:
            p.requires_grad_()
        with (
            torch.random.fork_rng(devices), copied_buffers(model.modules()), torch.enable_grad(),
            saved_tensors_hooks(lambda _: None, _not_kept),
        ):  # fmt: skip
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _not_kept(_: Any) -> Tensor:
    raise RuntimeError(
        "the model takes gradients inside its forward pass, so it cannot be tried out. Name its stages instead."
    )
