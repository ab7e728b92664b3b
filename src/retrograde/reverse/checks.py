"""Every replay is compared with the first run.

    fingerprint   a hash of what the block saved for autograd, at the first run and at the replay. Gradients are made
                  of nothing else, so this sees what enters a gradient alone, too. "auto" hashes a sample of each
                  tensor, evenly spread; "strict" all of it, and the output.
    rewound       a hash of the whole state at the first block that is replayed, on the way forward and at the end of
                  backward. An output that is not that of forward moves v, and v only grows further apart on the way
                  down, by 1/γ a layer.

"auto" waits for no accelerator: the comparison is a deferred check (`deferred`), made at the end of backward.
"strict" raises at once, before any gradient is made of what that replay has saved.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.kernels import KERNELS, digest, sampler
from ..errors import ReplayError
from .cuda import check_capturable
from .deferred import Deferred
from .fingerprint import SAMPLE, Picked, Picker, dense, local, undefined
from .replay import WHEN_NOT_REPEATED, Call

CHOICES = ("auto", "strict", "off")
AFTERWARDS = (
    "Zero the gradients, or go back to a checkpoint, before the next step. verify='strict' raises before they are made."
)
Saved = tuple[torch.Size, tuple[int, ...], torch.dtype, Picked | None]
"""Of a tensor that a block saved: shape, strides, dtype, and what of it makes the fingerprint."""


class Checks:
    """The comparisons of one pass.

    Args:
        blocks: how many calls there may be at most.
        verify: "auto" or "strict".
    """

    def __init__(self, blocks: int, device: torch.device, verify: str, deferred: Deferred) -> None:
        self.deferred = deferred
        self.strict = verify == "strict"
        if self.strict:
            check_capturable(device)
        self.names: dict[int, str] = {}
        self.saved: dict[int, list[Saved]] = {}  # by block, in its first run
        self.digest = KERNELS[Tensor, device.type, torch.int32].digest
        self.sample = sampler(device.type)
        self.waits = device.type != "cpu" or deferred.event_on is not None  # for what becomes known later
        # 16 bytes apart: aligned as kernels like it. The last one is of the rewound state
        self.noted = torch.zeros(blocks + 2, 2, dtype=torch.int64, device=device)
        self.slots = self.noted[:, 0].unbind()
        self.state = blocks  # the slot of the state's hash; block −1 has the last one
        self.of_state = self.slots[blocks]  # the hash before the first block that will be replayed
        # by backward pass: the hashes less those of its replays, each by itself too, and the blocks seen
        self.left: dict[int, tuple[Tensor, tuple[Tensor, ...], set[int]]] = {}

    def first_run(self, k: int, call: Call, x: Tensor) -> FirstRun:
        """Block k is about to be run on x for the first time."""
        return FirstRun(self, k, call, x)

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

    def rewound(self, hashed: Tensor) -> None:
        """The state is back there, and has this hash."""
        if self.strict:
            if bool(hashed != self.of_state):
                raise ReplayError(f"{_NOT_REWOUND} {WHEN_NOT_REPEATED}")
            return
        left = self._left()
        if left is not None:
            left[1][self.state].copy_(self.of_state - hashed)
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
        if self.waits or bool(wrong.any()):
            names = tuple(self.names.items())
            self.deferred.tell(wrong[:, 0].to(torch.uint8), partial(_judge, names, self.state), names)

    def _add(self, k: int, saved: list[Tensor], y: Any, into: Tensor, sign: int) -> None:
        """Add sign times the fingerprint of a replay to `into`."""
        found = Fingerprint(self, into, sign)
        for t, (shape, strides, dtype, pick) in zip(saved, self.saved[k], strict=True):
            if pick is not None:
                same = t.dtype is dtype and t.shape == shape and t.stride() == strides
                found.hash(t, pick, same or dense(t))  # else somebody else's memory might be read
        found.close(y)


class Fingerprint:
    """Adds sign times a hash of tensors to `into`."""

    def __init__(self, checks: Checks, into: Tensor, sign: int) -> None:
        self.checks = checks
        self.into = into
        self.sign = sign
        self.count = 0
        self.samples: dict[torch.dtype, list[Tensor]] = {}

    def hash(self, t: Tensor, pick: Picked, as_picked: bool) -> None:
        """`as_picked`: it lies in memory as it did when it was picked, or without gaps."""
        t = t if type(t) is Tensor else local(t)
        size, strides = pick
        if self.checks.strict:
            digest(t, self.into, self.count, self.sign)
        elif self.checks.sample is not None and len(size) == 1 and as_picked:
            self.checks.sample(t, size[0], strides[0], self.into, self.count, self.sign)
        else:
            t = t.detach()
            t = t.as_strided(size, strides) if size else t.reshape(-1)[:SAMPLE]
            t = t if t.dim() == 1 else t.reshape(-1)
            # on an accelerator all are hashed together, where the block ends: few kernels are to be launched
            self.samples.setdefault(t.dtype, []).append(t.clone() if t.device.type == "cpu" else t)
        self.count += 1

    def close(self, y: Any) -> None:
        """`y`: the block's output."""
        if self.checks.strict and isinstance(y, Tensor) and not undefined(y):
            digest(local(y), self.into, self.count, self.sign)
        for seed, some in enumerate(self.samples.values(), self.count):
            self.checks.digest(torch.cat(some), self.into, seed, self.sign)
        self.samples.clear()


class FirstRun(Fingerprint):
    """What a block saves in its first run, shown one after another. None of it is kept, so that it is freed as it would be."""

    def __init__(self, checks: Checks, k: int, call: Call, x: Tensor) -> None:
        super().__init__(checks, checks.slots[k], 1)
        checks.names[k] = call.name
        self.k = k
        self.call = call
        self.x = x
        self.kind = (x.shape, x.stride(), x.dtype)
        self.expected: list[Saved] = call.parts.fingerprints.get(self.kind, [])
        self.saved: list[Saved] = []
        self.picker: Picker | None = None

    def add(self, t: Tensor) -> None:
        """The block has saved this."""
        at = len(self.saved)
        one = self.expected[at] if at < len(self.expected) else None
        if one is None or t.dtype is not one[2] or t.shape != one[0] or t.stride() != one[1]:
            self.expected = []  # it goes another way than the last time
            self.picker = self.picker or Picker(self.call, self.x)
            one = t.shape, t.stride(), t.dtype, self.picker.pick(t)
        self.saved.append(one)
        if one[3] is not None:
            self.hash(t, one[3], True)

    def end(self, y: Any) -> bool:
        """It has run, and returned y; whether its replay is to give that, too."""
        self.close(y)
        self.checks.saved[self.k] = self.call.parts.fingerprints[self.kind] = self.saved
        return self.checks.strict


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
