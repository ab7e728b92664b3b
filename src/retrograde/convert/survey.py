"""What a converted model does before its first training step: it finds the range of each stage, and plans its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..memory.budget import Recorder
from ..memory.fake import is_fake
from ..stack.aside import copied_buffers
from ..stack.calibrate import apart, unheard
from ..stack.inputs import check_surroundings
from ..stack.uncompiled import uncompiled
from .stage import Stage

STAGES, SCHEDULER = "_retrograde_stages", "_retrograde_scheduler"
"""Where a model has its stages; what plans their memory, with their stacks."""


def survey(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before the first training step: run the model once without gradients, to learn the range of each stage; and plan it."""
    if not torch.is_grad_enabled() or any(map(is_fake, tree_leaves((args, kwargs)))):
        return
    stages: list[Stage] = model.__dict__.get(STAGES, [])
    if not all(stage.surveyed for stage in stages):
        check_surroundings()  # here: what a survey raises is not shown
        _survey(model, stages, args, kwargs)
    _schedule(model, args, kwargs)


@uncompiled
def _schedule(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    scheduler, stacks = model.__dict__.get(SCHEDULER, (None, []))
    stacks = [stack for stack in stacks if stack.owner is scheduler]  # others belong to a later conversion
    if scheduler is not None and scheduler.budget is not None and stacks:
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


def _survey(model: nn.Module, stages: list[Stage], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # or weights cast here, without gradients, would be found there later
    try:
        with torch.no_grad(), _rng_kept(devices), copied_buffers(model.modules()), unheard(model.modules()):
            for stage in stages:
                stage.surveying = True
            model.forward(*apart(args), **apart(kwargs))
    except Exception:  # what is wrong with the model shows in the step itself
        for stage in stages:
            stage.open.clear()  # a pass that was cut off says nothing of the blocks after it
    finally:
        torch.set_autocast_cache_enabled(cached)
        for stage in stages:
            stage.surveying, stage.surveyed = False, True
            stage.open.clear()


def _rng_kept(devices: set[torch.device]) -> Any:
    kinds = {device.type for device in devices}
    indices = [device.index or 0 for device in devices]
    return torch.random.fork_rng(indices, device_type=kinds.pop()) if kinds else torch.random.fork_rng([])
