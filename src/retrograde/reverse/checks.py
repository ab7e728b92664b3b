"""Every replay is compared with the first run.

    fingerprint   a hash of what the block saved for autograd, at the first run and at the replay. Gradients are made
                  of nothing else, so this sees what enters a gradient alone, too. "auto" hashes a sample of each
                  tensor, evenly spread; "strict" all of it, and the output.
    rewound       a hash of the whole state at the first block that is replayed, on the way forward and at the end of
                  backward. An output that is not that of forward moves v, and v only grows further apart on the way
                  down, by 1/γ a layer.

"auto" waits for no accelerator: the comparison is a deferred check (`deferred`), made at the end of backward.
"strict" raises at once, before any gradient is made of what that replay has saved.

What is left out of a fingerprint: parameters and buffers (writes to them are seen by their versions), the block's
input (the rewound state or the kept input vouches for it), running statistics and what a block copies of them, and
what has no defined value: bytes in a row and single integers (workspaces, places of generators). A block that contains
a random relu in evaluation, or a CTC loss, has no fingerprint: these save memory that they have not written.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..arithmetic.hash import digest, words
from ..arithmetic.kernels import kernels_for
from ..errors import ReplayError
from .deferred import Deferred, check_capturable
from .replay import WHEN_NOT_REPEATED, Call

CHOICES = ("auto", "strict", "off")
SAMPLE = 256
"""Elements of each tensor that "auto" hashes."""
AFTERWARDS = (
    "Zero the gradients, or go back to a checkpoint, before the next step. verify='strict' raises before they are made."
)


class Checks:
    """The comparisons of one pass.

    Args:
        blocks: how many calls there may be at most.
        verify: "auto" or "strict".
    """

    def __init__(self, blocks: int, device: torch.device, verify: str, deferred: Deferred) -> None:
        check_capturable(verify, device)
        self.deferred = deferred
        self.strict = verify == "strict"
        self.names: dict[int, str] = {}
        self.picked: dict[int, list[Picked]] = {}
        self.kernels = kernels_for(torch.empty(0, device=device))
        # 16 bytes apart: aligned as kernels like it. The last one is of the rewound state
        self.noted = torch.zeros(blocks + 2, 2, dtype=torch.int64, device=device)
        self.slots = self.noted[:, 0].unbind()
        self.state = blocks  # the slot of the state's hash; block −1 has the last one
        # by backward pass: the hashes less those of its replays, each by itself too, and the blocks seen
        self.left: dict[int, tuple[Tensor, tuple[Tensor, ...], set[int]]] = {}

    def note(self, k: int, call: Call, x: Tensor, saved: list[Tensor], y: Any) -> bool:
        """Block k saved these in its first run; whether its replay is to give the output, too."""
        self.names[k] = call.name
        self.picked[k] = picked(call, x, saved)
        self._add(k, saved, y, self.slots[k], 1)
        return self.strict

    def compare(self, k: int, saved: list[Tensor], y: Any) -> None:
        """Its replay saved these."""
        if self.strict:
            difference = self.slots[k].clone()
            self._add(k, saved, y, difference, -1)
            if bool(difference):
                raise ReplayError(
                    f"{self.names[k]} did not repeat itself: run again on the same input, it gave another output, or saved other "
                    f"values for autograd. {WHEN_NOT_REPEATED}"
                )
            return
        left = self._left()
        if left is not None and k not in left[2]:
            left[2].add(k)
            self._add(k, saved, y, left[1][k], -1)

    def mark(self, hashed: Tensor) -> None:
        """The state has this hash before the first block that will be replayed."""
        self.slots[self.state].copy_(hashed)

    def rewound(self, hashed: Tensor) -> None:
        """The state is back there, and has this hash."""
        if self.strict:
            if bool(hashed != self.slots[self.state]):
                raise ReplayError(f"{_NOT_REWOUND} {WHEN_NOT_REPEATED}")
            return
        left = self._left()
        if left is not None:
            left[1][self.state].copy_(self.slots[self.state] - hashed)
            left[2].add(self.state)

    def _left(self) -> tuple[Tensor, tuple[Tensor, ...], set[int]] | None:
        """Of the backward pass in progress."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        if task not in self.left:
            left = self.noted.clone()
            self.left[task] = left, left[:, 0].unbind(), set()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        return self.left[task]

    def _end(self, task: int) -> None:
        """The backward pass is over: what is left must be 0, or untouched."""
        left, _, seen = self.left.pop(task)
        wrong = (left != 0) & (left != self.noted)
        if self.state in seen:
            wrong[self.state] = left[self.state] != 0
        names = tuple(self.names.items())
        self.deferred.tell(wrong[:, 0].to(torch.uint8), partial(_judge, names, self.state), names)

    def _add(self, k: int, saved: list[Tensor], y: Any, into: Tensor, sign: int) -> None:
        """Add sign times the fingerprint to `into`."""
        if self.strict:
            tensors = [saved[index] for index, *_ in self.picked[k]]
            tensors = [*tensors, y] if isinstance(y, Tensor) and not _undefined(y) else tensors
            for seed, t in enumerate(tensors):
                digest(_local(t), into, seed, sign)
            return
        samples: dict[torch.dtype, list[Tensor]] = {}
        for index, size, step in self.picked[k]:
            t = _local(saved[index]).detach()
            t = t.as_strided(size, step) if size else t.reshape(-1)[:SAMPLE]
            samples.setdefault(t.dtype, []).append(t if t.dim() == 1 else t.reshape(-1))
        for seed, some in enumerate(samples.values()):
            self.kernels.digest(words(torch.cat(some)), into, seed, sign)


_NOT_REWOUND = (
    "the network did not rewind to its start: some block, run again in backward, gave another output than in forward."
)


def _judge(names: tuple[tuple[int, str], ...], state: int, wrong: Tensor, when: str) -> None:
    if not wrong.any():
        return
    differs = [name for k, name in names if wrong[k]]
    what = f"{differs[-1]}, run again, saved other values for autograd than in forward." if differs else ""
    if wrong[state]:  # then blocks below the culprit were run again on another input
        what = _NOT_REWOUND + (f" It is {differs[-1]} or one after it." if differs else "")
    raise ReplayError(f"the gradients of {when} backward pass are wrong: {what} {WHEN_NOT_REPEATED} {AFTERWARDS}")


Picked = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The index of a saved tensor, and size and strides of a sample that is spread evenly over it (none: its first elements)."""


def picked(call: Call, x: Tensor, saved: list[Tensor]) -> list[Picked]:
    """Which of the saved tensors make the fingerprint. Looked up by how they are laid out, once they are known."""
    known = call.parts.fingerprints
    kind = tuple([(t.shape, t.stride()) for t in saved])
    found = known.get(kind)
    if found is None:
        found = known[kind] = _picked(call, x, saved)
    return found


def _picked(call: Call, x: Tensor, saved: list[Tensor]) -> list[Picked]:
    if any(_has_undefined(m) for m in call.parts.modules):
        return []
    statistics = [t for own, _ in call.parts.statistics for t in own.values() if t is not None]
    copied = call.parts.instance_norms or any(map(_compiled, (call.block, *call.parts.modules)))
    others = [t for t in (*call.parts.watched, *statistics, x) if _plain(t)]
    excluded = {t.untyped_storage()._cdata for t in others}
    found: list[Picked] = []
    seen: set[tuple[Any, ...]] = set()
    for index, whole in enumerate(saved):
        t = _local(whole)
        if not _plain(t) or t.is_meta or t.is_quantized or _undefined(t) or not t.numel() or t.device != x.device:
            continue
        storage = t.untyped_storage()
        where = (t.data_ptr(), t.shape, t.stride())
        if not storage.nbytes() or storage._cdata in excluded or where in seen:
            continue  # no bytes: memory that is let go and filled again from outside, as FSDP does with parameters
        if copied and any(_same(t, s) for s in statistics):
            continue
        seen.add(where)
        found.append((index, *(((), ()) if t.is_complex() or t.is_neg() else spread(t))))
    return found


def spread(t: Tensor, count: int = SAMPLE, apart: int = 1 << 60) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and strides of a view of some `count` elements, spread evenly over a tensor. No copy of the tensor is made.

    In dense memory they are about so far `apart` at most, at a step that has no factor in common with any size: it meets every row,
    column and channel alike.
    """
    if _dense(t):
        step = min(max(t.numel() // count, 1), apart)
        while math.gcd(step, t.numel()) > 1:
            step += 1
        return (-(-t.numel() // step),), (step,)
    each = count ** (1 / sum(n > 1 for n in t.shape))  # elements of each dimension
    steps = [max(int(n // each), 1) for n in t.shape]
    return tuple(-(-n // step) for n, step in zip(t.shape, steps, strict=True)), tuple(
        stride * step for stride, step in zip(t.stride(), steps, strict=True)
    )


def _has_undefined(module: nn.Module) -> bool:
    """Whether a module saves memory that it has not written."""
    return isinstance(module, nn.CTCLoss) or (isinstance(module, nn.RReLU) and not module.training)


def _compiled(module: Any) -> bool:
    """Whether it was compiled: as a module, in place, or as the forward that a converted block is run by."""
    if type(module).__module__.startswith("torch._dynamo") or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether a may be a copy of b: running statistics, which a compiled block and instance norm save."""
    return (
        b.is_floating_point()
        and a.dim() <= 1
        and b.dim() <= 1
        and b.numel() > 0
        and a.numel() % b.numel() == 0
        and a.dtype == b.dtype
    )


def _local(t: Tensor) -> Tensor:
    """What is here of a tensor that is in pieces on several devices; else itself."""
    return t if type(t) is Tensor else getattr(t, "_local_tensor", t)


def _plain(t: Tensor) -> bool:
    return type(t) in (Tensor, Parameter) and t.layout is torch.strided


def _undefined(t: Tensor) -> bool:
    """Whether it may be a library's: bytes in a row, or the place of a generator, which attention without dropout leaves undefined."""
    if t.dtype.is_floating_point:
        return False
    return (
        t.dtype == torch.uint64
        or (t.dtype == torch.uint8 and t.dim() == 1)
        or (t.dtype == torch.int64 and t.dim() == 0)
    )


def _dense(t: Tensor) -> bool:
    """Whether it lies in memory without gaps."""
    if t.is_contiguous():
        return True
    return t.numel() == 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
