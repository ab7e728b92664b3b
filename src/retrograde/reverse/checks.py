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

from array import array
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.hash import digest
from ..arithmetic.kernels import KERNELS, sampler
from ..errors import ReplayError
from .cuda import check_capturable
from .deferred import Deferred
from .fingerprint import SAMPLE, Picked, dense, local, picked, undefined
from .replay import WHEN_NOT_REPEATED, Call

CHOICES = ("auto", "strict", "off")
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
        self.deferred = deferred
        self.strict = verify == "strict"
        if self.strict:
            check_capturable(device)
        self.names: dict[int, str] = {}
        self.layouts: dict[int, Any] = {}
        self.picked: dict[int, list[Picked]] = {}
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

    def note(self, k: int, call: Call, x: Tensor, saved: list[Tensor], y: Any) -> bool:
        """Block k saved these in its first run; whether its replay is to give the output, too."""
        self.names[k] = call.name
        known = call.parts.fingerprints
        layout = _layout(saved)
        if layout not in known:
            known[layout] = picked(call, x, saved)
        self.picked[k] = known[layout]
        self.layouts[k] = layout
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
        """Add sign times the fingerprint to `into`."""
        if self.strict:
            tensors = [saved[index] for index, *_ in self.picked[k]]
            tensors = [*tensors, y] if isinstance(y, Tensor) and not undefined(y) else tensors
            for seed, t in enumerate(tensors):
                digest(local(t), into, seed, sign)
            return
        samples: dict[torch.dtype, list[Tensor]] = {}
        places = array("q")  # of the samples that compiled code gathers
        same = sign > 0 or _layout(saved) == self.layouts[k]  # else dense, lest somebody else's memory is read
        for index, size, step in self.picked[k]:
            t = saved[index]
            t = t if type(t) is Tensor else local(t)
            if self.sample is not None and len(size) == 1 and (same or dense(t)):
                places.extend((t.data_ptr(), size[0], step[0] * t.itemsize, t.itemsize))
                continue
            t = t.detach()
            t = t.as_strided(size, step) if size else t.reshape(-1)[:SAMPLE]
            samples.setdefault(t.dtype, []).append(t if t.dim() == 1 else t.reshape(-1))
        count = len(places) // 4
        if self.sample is not None and count:
            self.sample(places.buffer_info()[0], count, sign, into.data_ptr())
        for seed, some in enumerate(samples.values(), count):
            self.digest(torch.cat(some), into, seed, sign)


def _layout(tensors: list[Tensor]) -> Any:
    return tuple([(t.shape, t.stride()) for t in tensors])


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
