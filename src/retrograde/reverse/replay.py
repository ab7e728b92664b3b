"""One run of one block that can be run again to the bit, and the hooks by which autograd finds what it saved.

A block runs under ordinary autograd with saved-tensor hooks that keep nothing (`Frame`). When backward first asks for a saved tensor,
the block's input is recalled, the block is run again, and its tensors are handed out. The graph is the genuine one.

What a block computes depends on more than its input: parameters and buffers, extra inputs, train or eval mode, random
numbers, autocast. A `Call` notes all of these at the first run, puts back what has changed since, and checks that no
tensor was changed in place.

NOTE 1 (lazily). A replay begins at the first unpack, not before: FSDP2 has gathered the parameters by then.
NOTE 2 (nothing saved). A block that saves nothing triggers no replay. The tape seeks past it, in either direction.
NOTE 3 (its own input). The replayed input is a tensor of its own. It requires a gradient exactly when the first one did,
    and where the block writes to it, it is no leaf.
NOTE 4 (surroundings). Autocast, random numbers (where they were drawn), running statistics, and lists that a block
    changes (`changes`) are put back around a replay, and restored after it: by one call into C, the first one of its
    `try` or `finally`, so that Ctrl-C cannot come in between. (Python looks for signals where a function of its own begins,
    and after each call.) What autograd saves is caught without `torch.autograd.graph.saved_tensors_hooks` for that reason.
NOTE 5 (grad mode). The first run is in grad mode, as the replay is: same kernels, same bits.
NOTE 6 (same thread). See `cuda.SameThread`. On a CPU a new thread computes with as many threads of OpenMP as there are,
    until it asks PyTorch how many there are to be; with another number products may be rounded otherwise. So it is asked.
NOTE 7 (freed at once). What the first run saves is not kept. What a replay has made is let go of as soon as autograd has
    taken it. Weights cast by autocast are freed after each block.
NOTE 8 (called once). The user's model is called once a step. Its blocks are run again in backward; in forward only where
    a pass has left its range on an accelerator (`again`), or a block takes a gradient inside (`inside`).
NOTE 9 (detected). A replay that differs from the first run is an error: see `checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..errors import ReplayError
from .changes import Buffers, Containers, all_at_once
from .cuda import Undrawn
from .extra import Extra, shared
from .heap import give_back
from .inside import saved_so_far
from .parts import Memo, parts_of

if TYPE_CHECKING:
    from .checks import Checks
    from .kept import Kept
    from .tape import Tape

version = attrgetter("_version")
_set_grad = torch._C._set_grad_enabled
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_ADVICE = "So the block cannot be run again as it was. Change it before the forward or after the backward pass, or use memory='store'."
WHEN_NOT_REPEATED = (
    "Make it deterministic (random numbers from torch's own generators, no state of its own, no atomics: "
    "torch.use_deterministic_algorithms(True)), or keep its activations with memory='store'."
)


class Enough(BaseException):
    """A replay has all it is run for. Not an `Exception`: blocks may catch those."""


class Call:
    """A block, what it was run with, and how to run it again."""

    def __init__(self, block: Any, name: str, memo: Memo | None = None, noted: Any = None) -> None:
        self.block = block
        self.name = name
        self.parts = parts_of(block, name, memo) if noted is None else noted.parts
        self.places: Any = None if noted is None else noted.places  # of the generators, if `again` has noted them

    def first(self, x: Tensor, extra: Extra, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Run the block for the first time, under hooks for the tensors that autograd wants saved."""
        self.args = extra.args
        self.kwargs = extra.kwargs
        self.watched = [*self.parts.constant, *extra.watched] if extra.watched else self.parts.constant
        self.containers = None
        if extra.contains or self.parts.holds:
            self.containers = Containers(self.parts, extra.args, extra.kwargs)
            self.args = ()  # what the block puts into its lists leads back here
            self.kwargs = {}
            self.watched = [*self.watched, *self.containers.tensors]
        self.versions = list(map(version, self.watched))
        self.buffers = Buffers(self.parts) if self.parts.buffers else None
        self.dtypes = [p.dtype for p in self.parts.parameters[:1]]
        self.surroundings = extra.surroundings(x)
        self.places = self.places or shared(self.surroundings.places())
        self.requires_grad = x.requires_grad
        self.recorded = torch.is_grad_enabled()
        torch.get_num_threads()  # NOTE 6
        before = x._version
        self.writes = self.in_first_run = True  # whether it writes to x is not known before it has run
        try:
            _push_hooks(pack, unpack)
            with Undrawn() if self.surroundings.capturing else nullcontext():
                y = self.block(x, *extra.args, **extra.kwargs)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise ReplayError(
                f"{self.name} calls torch.func.grad, vjp, jacrev or hessian, which PyTorch cannot run in a block that is run again in "
                "backward. Use torch.autograd.grad(..., create_graph=True), or memory='store'."
            ) from error
        finally:
            _pop_hooks()
            self.in_first_run = False
        self.writes = x._version != before
        if list(map(version, self.watched)) != self.versions:
            self._refuse_change("{} changed a parameter or an extra input while it ran")
        if self.buffers is not None:
            self.buffers.ran(self.name)
        return y

    def again(self, x: Tensor, saved: list[Tensor], wanted: int | None = None) -> Any:
        """Run the block as it was run first, on a fresh x; its output.

        Args:
            saved: receives the tensors that autograd wants saved.
            wanted: stop, without an output, at this number of them.
        """
        if list(map(version, self.watched)) != self.versions:
            self._refuse_change("a parameter or extra input of {} was changed after its forward pass")
        if self.buffers is not None:
            self.buffers.check(self.name)
        dtypes = [p.dtype for p in self.parts.parameters[:1]]  # `model.half()` changes them, and no version
        if dtypes != self.dtypes:
            raise ReplayError(
                f"the parameters of {self.name} were made {dtypes[0]} after its forward pass, in which they were {self.dtypes[0]}. "
                f"{_ADVICE}"
            )

        versions: list[int] = []

        def pack(t: Tensor) -> int:
            saved.append(t)
            versions.append(t._version)
            if len(saved) == wanted:
                raise Enough
            return len(saved) - 1

        def unpack(index: int | None) -> Tensor:
            if index is None or index >= len(saved):
                raise ReplayError(
                    f"{self.name} leaves something beside its output, a loss in a list say, and a gradient is asked of what it "
                    "left there when it was run again. Empty the list after the backward pass, return such losses, or use "
                    "memory='store'."
                )
            return saved[index]

        grad = torch.is_grad_enabled()
        args, kwargs = self.args, self.kwargs
        attributes: list[dict[str, Any]] = []
        if self.containers is not None:
            args, kwargs, attributes = self.containers.fresh()
        exchange, put_back = self.parts.exchanged(grad, attributes, self.buffers)
        surround, leave = self.surroundings.exchanged(self.places, casts=not self.in_first_run)
        before = chain(exchange, surround, map(_set_grad, [self.recorded]), map(_push_hooks, [pack], [unpack]))
        after = chain(starmap(_pop_hooks, [()]), put_back, map(_set_grad, [grad]), leave)
        torch.get_num_threads()  # NOTE 6
        try:  # NOTE 4
            all_at_once(before)
            x = x.requires_grad_(self.requires_grad)
            x = x.clone() if self.writes else x  # neither a leaf nor what was kept may be written to
            y = self.block(x, *args, **kwargs)
        except Enough:
            y = None
        finally:
            all_at_once(after)
        if list(map(version, saved)) != versions:
            raise ReplayError(f"{self.name} changed a tensor in place that autograd had saved. Change a copy instead.")
        return y.detach() if isinstance(y, Tensor) else y

    def _refuse_change(self, problem: str) -> None:
        changed = next(t for t, before in zip(self.watched, self.versions, strict=True) if t._version != before)
        raise ReplayError(f"{problem.format(self.name)} (a tensor of shape {tuple(changed.shape)}). {_ADVICE}")


class Frame:
    """One block in the graph: keeps nothing of what autograd wants saved, and finds it again when asked.

    Args:
        source: where the block's input comes from when it is run again.
        checks: what compares a replay with the first run.
        thread: a `SameThread`, while the graph lives.
    """

    def __init__(self, call: Call, source: Tape | Kept, k: int, checks: Checks | None, thread: Any) -> None:
        self.call = call
        self.source = source
        self.k = k
        self.checks = checks
        self.thread = thread
        self.to_the_end = False  # whether a replay must give the output, for the check
        self.eager = False  # whether the output may be changed by what runs before the next replay
        self.shapes: list[torch.Size] = []
        self.saved: list[Any] = []  # tensors, until they are asked for
        self.in_first_run: tuple[Tensor, int] | None = None  # in its first run: its input, and the version of that

    def run(self, x: Tensor, extra: Extra, look: Any = None) -> Any:
        """Run the block for the first time. `look` is shown what a plain run would have kept (`memory.schedule.Saved`)."""
        seen = None if self.checks is None else self.checks.first_run(self.k, self.call, x)
        shapes, last, elements = self.shapes, list[Tensor](), x.numel()
        shown = [watcher.add for watcher in (seen, look) if watcher is not None]

        def pack(t: Tensor) -> int:  # the graph keeps it, and with it whatever it refers to
            shapes.append(t.shape)
            for show in shown:
                show(t)
            last[:] = [t] if t.numel() == elements else []  # it may be the output
            return len(shapes) - 1

        try:
            self.in_first_run = x.detach(), x._version
            y = self.call.first(x, extra, pack, self.unpack)
            self.ends_saved = bool(last) and isinstance(y, Tensor) and torch._C._is_alias_of(last[0], y)  # type: ignore
            if seen is not None and shapes:
                self.to_the_end = seen.end(y)
            if look is not None:
                look.end(self.ends_saved)
            if self.ends_saved and isinstance(y.grad_fn, BackwardCFunction):
                self.eager = True  # a Function of the user's own may write to what it saved
            if any(p._post_accumulate_grad_hooks for p in self.call.parts.parameters) and y.requires_grad:
                self.eager = True  # the output may be a view of a parameter
                y.register_hook(self.prepare)
            return y
        finally:
            self.in_first_run = None
            self.saved.clear()
            last.clear()
            shown.clear()
            give_back(x)

    def unpack(self, index: int) -> Tensor:
        if not self.saved or self.saved[index] is None:
            if self.in_first_run is not None:
                self.saved = saved_so_far(self.call, *self.in_first_run, len(self.shapes))
            else:
                self.replay()
        t = self.saved[index]
        self.saved[index] = None
        return t

    def prepare(self, gradient: Tensor) -> None:
        """Run the block again before any gradient of its parameters is there: an optimizer in backward would change them."""
        if self.shapes and all(t is None for t in self.saved):
            self.replay()
        elif not self.shapes:
            self.source.pass_by(self.k)  # NOTE 2

    def replay(self) -> None:
        saved: list[Tensor] = []
        x = self.source.recall(self.k)
        partial = not (self.source.needs_output or self.ends_saved or self.to_the_end)
        try:
            y = self.call.again(x, saved, len(self.shapes) if partial else None)
            if [t.shape for t in saved] != self.shapes:
                raise ReplayError(
                    f"{self.call.name} did not repeat itself: run again in backward it saved {len(saved)} tensors for autograd, "
                    f"against {len(self.shapes)} in forward, or tensors of other shapes. {WHEN_NOT_REPEATED}"
                )
            if self.checks is not None:
                self.checks.compare(self.k, saved, y)
            self.source.settle(self.k, y, self.eager)
            self.saved = list(saved)
            give_back(x)
        except BaseException:
            self.source.abandon(x)
            raise
        finally:
            saved.clear()  # NOTE 7: break the reference cycle saved tensor → hook → this list
