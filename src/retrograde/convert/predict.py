"""The memory of a training step, predicted: the step is run on tensors without values, and every allocation is counted.

    peak = max over t of (bytes alive at time t)        held = the same between forward and backward

both above parameters, gradients and batch, as `measure` reports them. Nothing is computed and nothing is allocated, so the
model may be larger than the machine. What is not seen is what kernels allocate and free inside: workspaces of convolutions
and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.dry import device_of, dry
from ..measure.memory import Peak
from ..measure.step import as_call, mean_of_squares


@dataclass
class Prediction:
    """Bytes above parameters, gradients and batch, and how much of `held` came between the ends of each stretch."""

    memory: Peak
    kept: dict[str, int] = field(default_factory=dict)


def predict(
    model: nn.Module, batch: Any, *, loss: Callable[[Any], Tensor] | None = None, autocast: torch.dtype | None = None,
    watch: Mapping[str, tuple[str, str]] | None = None,
) -> Prediction:  # fmt: skip
    """Predict the memory of a training step.

    Args:
        model: the model; it is left as it is.
        batch: its input, as for `measure`; only shapes and dtypes matter.
        loss: from the output to a scalar; None for the mean of squares.
        autocast: the dtype of automatic mixed precision, or None.
        watch: stretches of which to say what their forward pass keeps: names, each with the paths of its first and last module.
    """
    modules = dict(model.named_modules())
    kept: dict[str, int] = dict.fromkeys(watch or {}, 0)
    criterion = loss or mean_of_squares
    with ExitStack() as stack:
        meter, batch = stack.enter_context(dry(model, batch))
        args, kwargs = as_call(batch)
        for name, (first, last) in (watch or {}).items():
            begun = modules[first].register_forward_pre_hook(lambda *_, n=name: _note(kept, n, -meter.now))
            ended = modules[last].register_forward_hook(lambda *_, n=name: _note(kept, n, meter.now))
            stack.callback(begun.remove)
            stack.callback(ended.remove)
        with torch.autocast(device_of(model), autocast, enabled=autocast is not None):
            scalar = criterion(model(*args, **kwargs))
        held = meter.now
        torch.autograd.backward(scalar)
        peak = meter.peak
    return Prediction(Peak(peak, held), kept)


def _note(kept: dict[str, int], name: str, amount: int) -> None:
    kept[name] += amount
