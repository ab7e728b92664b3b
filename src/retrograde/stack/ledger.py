"""Where inputs are kept, replays are proved block by block: hashes of forward and of the replay must be the same.

In general they are hashes of the output. But a block that ends in products would be run to its end for nothing else: its replay stops
at the last tensor that autograd has saved. There it is what those products are made of, which determines the output, and the start
of everything else saved; where autograd does not have all of that, it is everything saved, for a gradient is made of that
and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core.call import WHEN_NOT_REPEATED, Call
from ..core.errors import ReplayError
from ..core.verify import digest
from .kept import Held
from .later import Later, check_capturable
from .nodes import by_a_library, last, unfilled
from .thread import SameThread

_START = 4096  # elements of a tensor that is not hashed whole
_ALONE = {"cpu"}
"""Devices on which small tensors are hashed one by one. On others one hash of all: so many kernels would keep the host busy."""
KEPT = "They were not put back: zero them, or go back to a checkpoint, before the next step. verify='end' raises"


def at_end_of_backward(then: Any) -> None:
    """Have this done when the backward pass in progress has come to its end."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


class Gradients:
    """The gradients of some parameters as they are now."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.entries = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in set(parameters)]

    def restore(self) -> None:
        for p, gradient, values in self.entries:
            p.grad = gradient
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)


class Ledger:
    """Hashes of what the blocks of one pass saved for autograd, and of what their replays saved.

    A replay takes its hash off: what is then neither 0 nor untouched has not repeated itself.

    Args:
        verify: "auto": told `later`, gradients stay as they are; "end": raised before any gradient is made of what the replay has
            saved, and those of later blocks put back; "blocks": the same of everything saved, and the calls compare the outputs.
    """

    def __init__(self, blocks: int, device: torch.device, verify: str, later: Later) -> None:
        check_capturable(verify, device)
        self.later, self.names, self.picked = later, dict[int, str](), dict[int, dict[int, int]]()
        self.strict, self.parameters, self.before = verify != "auto", list[Tensor](), dict[int, Gradients]()
        self.noted = torch.zeros(
            blocks, 2, dtype=torch.int64, device=device
        )  # 16 bytes apart: aligned as kernels like it
        self.slots = self.noted[:, 0].unbind()
        # by backward pass: the hashes, each by itself too, and the blocks taken off
        self.left: dict[int, tuple[Tensor, tuple[Tensor, ...], set[int]]] = {}
        self.thread = SameThread() if device.type == "cuda" else None

    def note(self, k: int, call: Call, saved: list[Tensor], y: Any, x: Tensor | None) -> bool:
        """Block k, on x, saved these in forward and gave y; whether its replay is to have that too."""
        if self.strict:
            self.parameters += call.parts.parameters
        if call.verified:
            self.names[k], self.picked[k] = call.name, _all(call, saved, x, unfilled(call, saved, y))
            self._add(k, [*saved, y], self.slots[k], 1)
            return True
        one = isinstance(y, Tensor)
        ends, factors = last(y, saved, call.since) if one else (True, None)
        picked = None
        if ends:
            blank = unfilled(call, saved, y)
            picked = _picked(call, saved, x, lambda: self.strict or not by_a_library(y, call.since), factors, blank)
        whole = one and picked is None
        self.names[k], self.picked[k] = call.name, {len(saved): y.numel()} if whole else picked or {}
        if saved:
            self._add(k, [*saved, y], self.slots[k], 1)
        return whole

    def begin(self) -> None:
        """A block is about to be run again: if it is the first one of a backward pass, put gradients by."""
        task = torch._C._current_graph_task_id()
        if self.strict and task != -1 and task not in self.before:
            self.before[task] = Gradients(self.parameters)
            at_end_of_backward(lambda: self.before.pop(task, None))

    def undo(self) -> None:
        for gradients in reversed(list(self.before.values())):  # of a pass inside another first
            gradients.restore()
        self.before.clear()

    def check(self, k: int, saved: list[Tensor]) -> None:
        """Its replay saved these."""
        if not self.picked[k]:
            return
        if self.strict:
            left = self.slots[k].clone()
            self._add(k, saved, left, -1)
            if bool(left):
                raise ReplayError(
                    f"{self.names[k]} did not repeat itself: run again on the same input, it gave another output, or saved other "
                    f"values for autograd. {WHEN_NOT_REPEATED}"
                )
            return
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        if task not in self.left:
            left = self.noted.clone()
            self.left[task] = left, left[:, 0].unbind(), set()
            at_end_of_backward(partial(self._end, task))
        _, slots, done = self.left[task]
        if k not in done:
            done.add(k)
            self._add(k, saved, slots[k], -1)

    @torch.no_grad()
    def _add(self, k: int, saved: list[Tensor], into: Tensor, sign: int) -> None:
        small, device, alone = list[Tensor](), into.get_device(), into.device.type in _ALONE
        for index, most in self.picked[k].items():
            t = _start(_local(saved[index]), most)
            if alone or t.numel() > _START or t.get_device() != device:
                digest(t, into, index, sign)
            else:
                small.append(_bytes(t))
        if small:
            digest(torch.cat(small), into, len(saved), sign)

    def _end(self, task: int) -> None:
        left, _, _ = self.left.pop(task)
        names = tuple(self.names.values())
        self.later.tell((left != 0) & (left != self.noted), partial(_judge_saved, self.names), names)


def _judge_saved(names: dict[int, str], differs: Tensor, when: str) -> None:
    if differs.any():
        name = names[next(k for k in names if differs[k].any())]
        raise ReplayError(
            f"the gradients of {when} backward pass are wrong: {name}, run again, saved other values for autograd than in forward. "
            f"{KEPT} before that block's own are made, and puts the others back."
        )


def _picked(
    call: Call,
    saved: list[Tensor],
    x: Tensor | None,
    strict: Callable[[], bool],
    factors: set[int] | None,
    blank: set[int] | None,
) -> dict[int, int] | None:
    """Which of the tensors are to be hashed, and how many elements of each at most; None: the output instead.

    If there are `factors`, those, and the start of the others: what is multiplied by a zero (a gate, an adapter that has not been
    trained yet), or has a gradient of its own, leaves no trace in them. Else all but the block's input, which is kept; running
    statistics, on which no gradient depends and which are put aside in a replay (instance norm saves copies of them: then the
    output); what is `blank` (`unfilled`; None: the output); bytes in a row and single numbers, which may be libraries' and hold
    anything, and what cannot be read (strict: then the output). Of parameters and buffers the start will do: autograd too holds
    them as they are, every write to them but one through `.data` is noticed, and those are to whole tensors.
    """
    loose = blank is None or (bool(call.parts.statistics) and call.parts.instance_norms)
    if factors is None and loose:
        return None
    known = _addresses([t for own, _ in call.parts.statistics for t in own.values()] + [x])
    held = _addresses(call.parts.watched)
    seen, picked = set[tuple[Any, ...]](), dict[int, int]()
    for index, t in enumerate(saved):
        t, factor = _local(t), factors is None or index in factors
        where = _whereabouts(t) if _plain(t) and not t.is_meta else (-1, 1)
        if not where[0] or (blank and index in blank) or (not factor and (loose or where[0] in held)):
            continue  # 0: memory that is let go and filled again from outside, as FSDP does with parameters
        if where[0] == -1 or t.is_quantized or _undefined(t):
            if factor and not t.is_meta and (factors is not None or strict()):
                return None
        elif where[1] and where[0] not in known and (where, factor) not in seen:
            seen.add((where, factor))
            picked[index] = t.numel() if factor and where[0] not in held else _START
    return picked


def _all(call: Call, saved: list[Tensor], x: Tensor | None, blank: set[int] | None) -> dict[int, int]:
    """As `_picked`, of all the tensors that can be compared, without copies of running statistics: a compiled block saves those."""
    statistics = [t for own, _ in call.parts.statistics for t in own.values() if t is not None]
    copies = {index for index, t in enumerate(saved) if _plain(t) and any(_same(t, s) for s in statistics)}
    picked = _picked(call, saved, x, lambda: False, None, blank) or {}
    return {index: most for index, most in picked.items() if index not in copies}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _local(t: Tensor) -> Tensor:
    """What is here of a tensor that is in pieces on several devices; else itself."""
    return t if type(t) is Tensor else getattr(t, "_local_tensor", t)


def _plain(t: Tensor) -> bool:
    return type(t) in (Tensor, Parameter) and t.layout is torch.strided


def _undefined(t: Tensor) -> bool:
    """Whether it may be a library's: bytes in a row, or the place of a generator, which attention without dropout leaves undefined."""
    dtype = t.dtype
    if dtype.is_floating_point:
        return False
    return dtype == torch.uint64 or (dtype == torch.uint8 and t.dim() == 1) or (dtype == torch.int64 and t.dim() == 0)


def _whereabouts(t: Tensor) -> tuple[Any, ...]:
    """Address and bytes; with gaps, or with elements in several places, also how it lies there."""
    where = t.data_ptr(), t.nbytes
    return where if _dense(t) else (*where, t.shape, t.stride())


def _dense(t: Tensor) -> bool:
    """Whether it lies in memory without gaps."""
    if t.is_contiguous():
        return True
    return t.numel() == 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))


def _addresses(tensors: Iterable[Tensor | None]) -> set[int]:
    """Where tensors are, those that have values of their own."""
    return {t.data_ptr() for t in tensors if t is not None and _plain(t)}


def _start(t: Tensor, most: int) -> Tensor:
    """At most so many elements of a tensor; the first in memory, if it lies there without gaps: no copy is made of them."""
    if _dense(t):
        size = t.numel()
        return t if size <= most and t.stride() == (1,) else t.as_strided((min(size, most),), (1,))
    while t.numel() > most and t.dim() > 1:
        t = t[0]
    return t[:most] if t.dim() == 1 else t


def _bytes(t: Tensor) -> Tensor:
    """Its values as bytes in a row."""
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    if t.stride() != (1,):
        t = t.contiguous().as_strided((t.numel(),), (1,))
    return t.view(torch.uint8)


class Noted(Held):
    """A block's input, kept, whose replay is checked."""

    def __init__(self, x: Tensor, ledger: Ledger, k: int) -> None:
        super().__init__(x)
        self.ledger, self.k = ledger, k

    def recall(self, k: int) -> Tensor:
        self.ledger.begin()
        try:
            return super().recall(k)
        except ReplayError:
            self.ledger.undo()
            raise

    def abandon(self, k: int) -> None:
        self.ledger.undo()

    def note(self, call: Call, saved: list[Tensor], y: Any) -> None:
        self.needs_output = self.ledger.note(self.k, call, saved, y, self.x)

    def check(self, call: Call, saved: list[Tensor], y: Any) -> None:
        self.ledger.check(self.k, [*saved, y])
