"""What a block is made of: its modules, parameters and buffers, and how they are put back where they were exchanged.

A network keeps what it found of its blocks in a memo; what is no longer as it was is looked up anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from .changes import CONTAINERS, Buffers, has_statistics, scratch

_training = attrgetter("training")
_MODULE = frozenset(vars(nn.Module()))


written = attrgetter("_version")


class Parts:
    """The parts of a block as they are now."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.root: Any = ref(modules[0]) if modules else _none  # a memo does not keep its blocks alive
        self.inner = modules[1:]
        self.views = [own.values() for m in modules for own in (m._parameters, m._buffers, m._modules)]
        own = [(k, vars(m)) for k, m in enumerate(modules) if not type(m).__module__.startswith("torch.")]
        self.noted = [(k, [n for n in of if n not in _MODULE and type(of[n]) in CONTAINERS]) for k, of in own]
        self.writes: bool | None = (
            None  # to a parameter or a buffer, running statistics aside: what `again` has seen; None: nothing
        )
        self.holds = any(names for _, names in self.noted)
        self.contents = self._contents()  # modes first
        moving = {m for m in modules if has_statistics(m)}
        self.instance_norms = any(isinstance(m, _InstanceNorm) for m in modules)
        # instance norm writes in a way that is counted, also for others who have saved the same memory
        shared = not self.instance_norms
        self.statistics = [(m._buffers, {name: scratch(b, shared) for name, b in m._buffers.items()}) for m in moving]
        self.running_statistics = [b for own, _ in self.statistics for b in own.values() if b is not None]
        self.counted = not any(b.is_inference() for b in self.running_statistics)
        self.buffers = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers and m not in moving]
        # a sharded parameter (DTensor) is gathered and put back by its own machinery: that is left alone
        self.registered = [(m._parameters, dict(m._parameters)) for m in modules if m._parameters and _plain(m)]
        self.parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        buffers = [b for _, own in self.buffers for b in own.values() if b is not None]
        self.settled = not any(map(is_lazy, (*self.parameters, *buffers)))
        self.constant = [p for p in self.parameters if not is_lazy(p) and not p.is_inference()]
        self.watched = [*self.constant, *(b for b in buffers if not is_lazy(b) and not b.is_inference())]
        self.moving: set[int] | None = None  # the ids of dictionaries of buffers that a run moves; None: not known yet
        self.training = list(map(_training, modules))  # no `__dict__` of the root: a converted block's leads back here
        self.fingerprints: dict[Any, list[Any]] = {}  # by what the block saves: which tensors are compared (`checks`)

    def written(self) -> list[int] | None:
        """How often the running statistics have been written to; None where that is not counted."""
        return list(map(written, self.running_statistics)) if self.counted else None

    def replaced(self) -> bool:
        """Whether another buffer stands where there was one."""
        return any(own.get(name) is not b for own, before in self.buffers for name, b in before.items())

    def exchanged(
        self, fresh: bool, attributes: list[dict[str, Any]], buffers: Buffers | None
    ) -> tuple[Iterator[Any], Iterator[Any]]:
        """The calls that put what a replay is to find into the modules, and those that put back what was there.

        Running statistics are written to scratch memory. What was exchanged since these parts were noted (modes,
        buffers, parameters) stands there as it was. They are for `all_at_once`.

        Args:
            fresh: scratch memory of its own, for a graph of the backward pass keeps it.
            attributes: containers of the modules, as `Containers.fresh` returned them.
            buffers: those that a run moves, as they were before it.
        """
        own: list[dict[str, Any]] = [of for of, _ in self.statistics]
        replay: list[dict[str, Any]] = [scratch for _, scratch in self.statistics]
        if fresh:
            replay = [{name: b if b is None else b.clone() for name, b in scratch.items()} for scratch in replay]
        if not self.unchanged():
            modes = [(m.__dict__, {"training": was}) for m, was in zip(self.modules, self.training, strict=True)]
            before = [*modes, *self.buffers, *self.registered]
            own += [of for of, _ in before]
            replay += [was for _, was in before]
        if buffers is not None:
            moved = buffers.fresh()
            own += [of for of, _ in moved]
            replay += [values for _, values in moved]
        if attributes:
            own += [vars(self.modules[k]) for k, names in self.noted if names]
            replay += attributes
        original = [{name: of[name] for name in other if name in of} for of, other in zip(own, replay, strict=True)]
        added = [(of, name) for of, other in zip(own, replay, strict=True) for name in other if name not in of]
        removed = map(dict.pop, [of for of, _ in added], [name for _, name in added], repeat(None))
        put_back = chain(map(dict.update, own, original), removed)
        return map(dict.update, own, replay), put_back

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        root = self.root()
        return self.inner if root is None else (root, *self.inner)

    def unchanged(self) -> bool:
        """Whether all of it is still there, in the same mode."""
        now = self._contents()
        return len(now) == len(self.contents) and all(map(is_, now, self.contents))

    def _contents(self) -> list[Any]:
        root = self.root()
        modules = self.inner if root is None else (root, *self.inner)
        sizes = [len(vars(modules[k])) for k, _ in self.noted]  # a module may have been given a list of losses since
        return [*map(_training, modules), *sizes, *chain.from_iterable(self.views)]


class Memo(dict[str, Parts]):
    """What a network knows of its blocks, by their names. Copies and pickles of it are empty."""

    def __reduce__(self) -> Any:
        return Memo, ()


def parts_of(block: Any, name: str, memo: Memo | None) -> Parts:
    """The parts of a module, or of anything with `modules()`; a function has none."""
    known = None if memo is None else memo.get(name)
    root = block if isinstance(block, nn.Module) else next(block.modules(), None) if hasattr(block, "modules") else None
    if known is not None and known.root() is root and known.unchanged():
        return known
    parts = Parts(() if root is None else tuple(block.modules()))
    same = known is not None and known.root() is root and list(map(id, known.inner)) == list(map(id, parts.inner))
    if known is not None and same and known.training == parts.training:  # other parts because a buffer is another
        parts.writes = known.writes
        parts.moving = known.moving
    if memo is not None and parts.settled:
        memo[name] = parts
    return parts


def _none() -> None:
    return None


def _plain(module: nn.Module) -> bool:
    return all(p is None or type(p) in (Tensor, nn.Parameter) for p in module._parameters.values())
