"""One run of one block, written down so that it can be run again to the bit.

What a block computes depends on more than its input: its parameters and buffers, its extra inputs, train or eval mode,
random numbers, autocast. A `Call` notes all of these at the first run; at every later one it puts back what has changed
since (which tensors, mode, random numbers, autocast) and checks that no tensor was changed in place. Running statistics of
normalisation layers move in the first run only: later runs put theirs aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from .errors import ReplayError
from .parts import Memo, parts_of, swapped
from .rng import Generators, Undrawn, shared
from .verify import checksum

Autocast = list[tuple[str, bool, torch.dtype, bool]]
version, _NOTHING = attrgetter("_version"), nullcontext()
_ADVICE = "So the block cannot be run again as it was. Change it before the forward or after the backward pass, or use memory='store'."
WHEN_NOT_REPEATED = (
    "Make it deterministic (random numbers from torch's own generators, no state of its own, no atomics: "
    "torch.use_deterministic_algorithms(True)), or keep its activations with memory='store'."
)


class Extra:
    """The inputs that every block of a network gets besides x."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        leaves = tree_leaves((args, kwargs)) if args or kwargs else ()
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        self.watched = [t for t in self.tensors if not t.is_inference()]
        self._around: tuple[Generators, Autocast] | None = None

    def devices(self, x: Tensor) -> tuple[torch.device, ...]:
        """Whose random generators a block may draw from, besides the CPU's."""
        return tuple({t.device for t in (x, *self.tensors) if t.device.type not in ("cpu", "meta")})

    def around(self, x: Tensor) -> tuple[Generators, Autocast]:
        """The generators that a block may draw from, and how autocast is set."""
        if self._around is None:
            self._around = Generators(self.devices(x), self.generators), _autocast_state(x.device.type)
        return self._around


class Enough(BaseException):
    """A replay that has all it is run for. Not an `Exception`: blocks may catch those."""


class Call:
    """A block, what it was run with, and how to run it again. `memo`: see `parts`."""

    def __init__(self, block: Any, extra: Extra, name: str, *, verified: bool, memo: Memo | None = None) -> None:
        self.block, self.extra, self.name, self.verified = block, extra, name, verified
        self.parts, self.differentiates = parts_of(block, name, memo), False  # a gradient inside its own forward
        self.watched = self.parts.watched + extra.watched if extra.watched else self.parts.watched

    def first(self, x: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Run the block for the first time, under hooks for the tensors that autograd wants saved."""
        self.versions, before = list(map(version, self.watched)), x._version
        self.generators, self.autocast = self.extra.around(x)
        self.requires_grad, self.places = x.requires_grad, shared(self.generators.places())
        self.recorded, self.since = torch.is_grad_enabled(), torch.autograd._get_sequence_nr()  # its first node's
        with saved_tensors_hooks(pack, unpack), Undrawn() if self.generators.capturing else _NOTHING:
            y = self.block(x, *self.extra.args, **self.extra.kwargs)
        self.writes = x._version != before
        self._check_unchanged("{} changed a parameter, a buffer or an extra input while it ran")
        replaced = [name for own, before in self.parts.buffers for name, b in before.items() if own.get(name) is not b]
        if replaced:
            raise ReplayError(f"{self.name} replaced its buffer {replaced[0]!r} while it ran. {_ADVICE}")
        self.checksum = checksum(y) if self.verified and isinstance(y, Tensor) else None
        return y

    def again(self, x: Tensor, saved: list[Tensor], wanted: int | None = None) -> Any:
        """Run the block as it was run first, on a fresh x; its output.

        `saved` receives the tensors that autograd wants saved; the run stops, without an output, at the number wanted.
        """
        self._check_unchanged("a parameter, buffer or extra input of {} was changed after its forward pass")

        def pack(t: Tensor) -> int:
            saved.append(t)
            if len(saved) == wanted:
                raise Enough
            return len(saved) - 1

        hook = saved.append if wanted is None and not self.differentiates else pack  # without Python, where nobody asks
        unchanged, autocast = self.parts.unchanged(), _autocast_state(x.device.type)
        other = [then for then in self.autocast if then not in autocast]
        around = self._as_it_was(unchanged, other) if other or not unchanged else _NOTHING
        generators, statistics = self.generators, self.parts.statistics
        now, originals, grad = generators.places(), [dict(own) for own, _ in statistics], torch.is_grad_enabled()
        try:
            for own, scratch in statistics:  # a graph of the backward pass keeps them: then they must be its own
                own.update({name: b if b is None else b.clone() for name, b in scratch.items()} if grad else scratch)
            generators.put(self.places)
            torch._C._set_grad_enabled(self.recorded)
            with around, saved_tensors_hooks(hook, saved.__getitem__):
                x = x.requires_grad_(self.requires_grad)
                x = x.clone() if self.writes else x  # neither a leaf nor what was kept may be written to
                y = self.block(x, *self.extra.args, **self.extra.kwargs)
        except Enough:
            return None
        finally:
            torch._C._set_grad_enabled(grad)
            torch.clear_autocast_cache()  # or weights cast here would be held on
            generators.put(now)
            for (own, _), original in zip(statistics, originals, strict=True):
                own.update(original)
        if self.checksum is not None and checksum(y) != self.checksum:
            raise ReplayError(
                f"{self.name} did not repeat itself: run again on the same input, it gave another output. {WHEN_NOT_REPEATED}"
            )
        return y.detach()

    @contextmanager
    def _as_it_was(self, unchanged: bool, autocast: Autocast) -> Iterator[None]:
        """Mode, tensors and autocast as they were at the first run."""
        with ExitStack() as stack:
            for m, mode in () if unchanged else zip(self.parts.modules, self.parts.contents, strict=False):
                stack.callback(setattr, m, "training", m.training)
                m.training = mode
            stack.enter_context(_NOTHING if unchanged else swapped([*self.parts.buffers, *self.parts.registered]))
            for device, enabled, dtype, cache in autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    def _check_unchanged(self, problem: str) -> None:
        now = list(map(version, self.watched))
        if now != self.versions:
            shapes = (t.shape for t, a, b in zip(self.watched, now, self.versions, strict=True) if a != b)
            raise ReplayError(f"{problem.format(self.name)} (a tensor of shape {tuple(next(shapes))}). {_ADVICE}")


def _autocast_state(device: str) -> Autocast:
    cache, devices = torch.is_autocast_cache_enabled(), ("cpu",) if device in ("cpu", "meta") else ("cpu", device)
    return [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cache) for d in devices]
