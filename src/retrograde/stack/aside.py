"""Runs that leave no trace: random numbers drawn and buffers written aside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from ..core.parts import swapped
from ..core.rng import Generators


@contextmanager
def rng_kept(devices: Sequence[torch.device], given: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw random numbers from where the generators stand, and leave them there."""
    generators = Generators(devices, given)
    now = generators.places()
    try:
        yield
    finally:
        generators.put(now)


def copied_buffers(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let the modules work on copies of their buffers."""
    own = [m._buffers for m in modules if m._buffers]
    return swapped([(b, {name: t if t is None else t.clone() for name, t in b.items()}) for b in own])
