"""Checkpointing that a model or a trainer turns on by itself: around converted blocks, replays take its place.

    model.gradient_checkpointing_enable()       transformers: each layer has a flag, and a function that runs it checkpointed
    model.set_grad_checkpointing()              timm: the model's forward calls checkpoint(block, x)
    checkpoint_wrapper(block)                   FSDP, Accelerate, Lightning: a module around the block does

Flags stay as they are set, so that who asks is told what he said, and `revert` leaves the model checkpointed. A converted block gives
transformers another function, which runs it directly. `checkpoint(..., use_reentrant=False)` remembers what is run in it by
saved-tensor hooks. These are put aside while a converted block runs. With nothing saved, it runs nothing again.

What cannot be put aside is `checkpoint(block, x, use_reentrant=True)` in a model's own code: it runs the block without gradients, then
alone in backward, where it has no velocity. `Stage` refuses that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

_log = logging.getLogger("retrograde")
_hooks = torch._C._autograd
_top = getattr(_hooks, "_top_saved_tensors_default_hooks", lambda _: None)  # torch 2.8; needed for memory="store" alone
REENTRANT = (
    "the model checkpoints its activations itself, in a way that runs a block without gradients first, and by itself in backward: "
    "use_reentrant=True. Pass use_reentrant=False, of which converted blocks take the place, or turn the model's checkpointing off."
)


@lru_cache(maxsize=1)
def say_once() -> None:
    """Tell the log, once in a process."""
    _log.warning(
        "The model asks for gradient checkpointing. Its converted blocks are not checkpointed: what they need in backward is recalled "
        "in the way of memory=… instead."
    )


def directly(block: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """In the place of `torch.utils.checkpoint.checkpoint`: run the block, as it is."""
    say_once()
    return block(*args)


@contextmanager
def outside_checkpoints() -> Iterator[None]:
    """Put the hooks of `torch.utils.checkpoint` aside. Other hooks, as `save_on_cpu`, remain."""
    aside: list[Any] = []
    try:
        while (top := _top(True)) is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint":
            _hooks._pop_saved_tensors_default_hooks()
            aside.append(top)
        if aside:
            say_once()
        yield
    finally:
        for pack, unpack in reversed(aside):
            _hooks._push_saved_tensors_default_hooks(pack, unpack)
