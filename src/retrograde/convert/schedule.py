"""What a converted model does before a step: it plans its memory within its budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..memory.budget import Recorder, Scheduler
from ..memory.fake import is_fake
from ..memory.modes import Stack

SCHEDULER = "_retrograde_scheduler"
"""Where a model has what plans its memory, with the stacks of its stages."""


def schedule_by(scheduler: Scheduler, model: nn.Module, stacks: list[Stack]) -> None:
    """Let the scheduler plan the memory of a model's stages before each step."""
    model.__dict__[SCHEDULER] = scheduler, stacks
    if not any(hook is schedule for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(schedule, with_kwargs=True)


@torch._disable_dynamo
def schedule(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give each stage its memory plan for this step. A forward pre-hook of a model with a budget."""
    scheduler, stacks = model.__dict__[SCHEDULER]
    stacks = [stack for stack in stacks if stack.owner is scheduler]  # others belong to a later conversion
    if stacks and torch.is_grad_enabled() and not any(map(is_fake, tree_leaves((args, kwargs)))):
        recorder = scheduler.schedule(model, stacks, args, kwargs)
        if recorder is not None:
            _around(model, recorder)


def _around(model: nn.Module, recorder: Recorder) -> None:
    """Let the recorder see what this forward pass saves outside of the stages."""
    seen = recorder.around()
    seen.__enter__()

    def ended(*_: Any) -> None:
        handle.remove()
        seen.__exit__(None, None, None)

    handle = model.register_forward_hook(ended, always_call=True)


def unschedule(model: nn.Module) -> None:
    """Plan no more memory for the stages of a model."""
    for module in model.modules():
        if module.__dict__.pop(SCHEDULER, None) is not None:
            for key, hook in list(module._forward_pre_hooks.items()):
                if hook is schedule:
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
