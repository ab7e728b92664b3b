"""The nodes that a block adds to autograd's graph: what it ends in, and which of the tensors saved say nothing.

A node is the block's own if its number in the graph is not below that of the first one (`Call.since`); the walk ends at others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import RReLU

from ..core.call import Call
from ..core.parts import Parts

_PRODUCTS = {  # the names of their factors, and which inputs they are
    "MmBackward0": {"self": 0, "mat2": 1}, "AddmmBackward0": {"mat1": 1, "mat2": 2}, "BmmBackward0": {"self": 0, "mat2": 1},
    "LinearBackward0": {"input": 0, "weight": 1}, "ConvolutionBackward0": {"input": 0, "weight": 1},
}  # fmt: skip
_FACTORS = {
    name: [(f"_raw_saved_{factor}", at) for factor, at in factors.items()]
    for name, factors in {**_PRODUCTS, "MulBackward0": {"self": 0, "other": 1}}.items()
}
_LINEAR = {
    "AddBackward0", "SubBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0",
    "PermuteBackward0", "ToCopyBackward0",
}  # fmt: skip
_MOST = 32  # nodes to look at


def _own(node: Any, since: int) -> str | None:
    """The name of a node, if it is one of the block's."""
    if node is None or (name := node.name()) == "torch::autograd::AccumulateGrad" or node._sequence_nr() < since:
        return None
    return name


def last(y: Tensor, saved: list[Tensor], since: int) -> tuple[bool, set[int] | None]:
    """Whether the last things a block does, for which autograd saves anything, are matrix products or convolutions; and which of the
    tensors saved these are made of, if all of it was saved here and nothing else goes into y but what the block was given.

    No hook is asked for a tensor: those of others (a checkpoint inside the block) run code, or give each tensor but once.
    """
    nodes, ends, factors, all_of_it = list[Any]([y.grad_fn]), False, set[int](), True
    for node in nodes:
        name = _own(node, since)
        if name is None:
            continue
        if (name not in _FACTORS and name not in _LINEAR) or len(nodes) > _MOST:
            all_of_it = False
            continue
        made = dict[int, int]()
        for factor, at in _FACTORS.get(name, ()):
            raw = getattr(node, factor)
            hook = getattr(raw, "unpack_hook", None)
            if hook is None:
                all_of_it &= hasattr(raw, "unpack_hook")  # not in torch 2.6
            elif getattr(getattr(hook, "__self__", None), "fresh", None) is saved:
                made[at] = raw.data
            else:
                return False, None  # another hook's: what it keeps is not seen here
        ends |= name in _PRODUCTS
        factors.update(made.values())
        nodes += [following for at, (following, _) in enumerate(node.next_functions) if at not in made]
    return ends, factors if all_of_it else None


def _nodes(outputs: Iterable[Tensor], since: int) -> Iterator[tuple[Any, str]]:
    """All of the block's nodes that lead to these, with their names."""
    nodes = {y.grad_fn for y in outputs}
    left = list[Any](nodes)
    while left:
        node = left.pop()
        name = _own(node, since)
        if name is not None:
            yield node, name
            new = {following for following, _ in node.next_functions} - nodes
            nodes |= new
            left += new


def by_a_library(y: Any, since: int) -> bool:
    """Whether the block has kernels of libraries, which may save what has no defined value: places of generators, workspaces."""
    if not isinstance(y, Tensor):
        return True
    return any(word in name for _, name in _nodes([y], since) for word in ("Attention", "Cudnn", "Miopen", "Rnn"))


_UNFILLED = {"RreluWithNoise": "_raw_saved_noise", "CtcLoss": "_raw_saved_result1"}
_filled: WeakKeyDictionary[Parts, set[tuple[int, int]]] = WeakKeyDictionary()


def unfilled(call: Call, saved: list[Tensor], y: Any) -> set[int] | None:
    """Which of the tensors saved are memory that nobody has written, or not all of it; None: some, and it cannot be said which.

    They are the noise that a random relu does not draw in eval mode and what a CTC loss does not need of its table (of all that
    PyTorch's operations save on a CPU only these differ with what was in the memory before; mkldnn's LSTM saves bytes). Looked
    for in what leads to y and to tensors that the modules of the block hold. That takes a microsecond a node, so a block without
    any is known again by how many nodes it has and how many tensors it saved.
    """
    since, found, any_here = call.since, set[int](), False
    kind, known = (torch.autograd._get_sequence_nr() - since, len(saved)), _filled.setdefault(call.parts, set())
    if kind in known:
        return found
    held = (t for m in call.parts.modules for t in vars(m).values())
    for node, name in _nodes([t for t in (y, *held) if isinstance(t, Tensor)], since):
        if name == "torch::autograd::CopySlices" and any(
            isinstance(m, RReLU) and not m.training for m in call.parts.modules
        ):
            return None  # an operation in place on a view, which is not shown
        attribute = _UNFILLED.get(name.partition("Backward")[0])
        if attribute is None:
            continue
        any_here, raw = True, getattr(node, attribute)
        if getattr(node, "_saved_training", False):  # noise that is drawn
            continue
        if not hasattr(raw, "unpack_hook"):  # torch 2.6
            return None
        if getattr(getattr(raw.unpack_hook, "__self__", None), "fresh", None) is saved:
            found.add(raw.data)
    if not any_here:
        known.add(kind)
    return found
