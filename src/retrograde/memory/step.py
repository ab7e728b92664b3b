"""One training step of any model, measured: forward, loss, backward.

The figures are of activations. Parameters, batch and gradients exist before the step begins, and the step adds to the
gradients. So a step needs the sum of the lines in all, plus the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .peak import peak_memory, system_growth
from .timing import Times, interleave
from .units import human


@dataclass(frozen=True)
class Report:
    """What one training step takes. Bytes, and seconds.

    Attributes:
        peak: the most memory above parameters, gradients and batch at any time of the step.
        held: what the forward pass keeps for the backward pass, the output and the loss included.
        resident: what the system counts: by how much the process grew in a step, or on a GPU what the allocator reserved; None where
            the system does not say.
        parameters, gradients: their bytes.
        output: what the model returned, detached.
    """

    peak: int
    held: int
    parameters: int
    gradients: int
    times: Times
    output: Any = field(repr=False)
    resident: int | None = None

    def __str__(self) -> str:
        lines = {
            "peak memory": human(self.peak),
            "from the system": "not known" if self.resident is None else human(self.resident),
            "held for backward": human(self.held),
            "parameters": human(self.parameters),
            "gradients": human(self.gradients),
            "step time": str(self.times),
        }
        return "\n".join(f"{name:<18} {value}" for name, value in lines.items())


def measure(
    model: nn.Module, batch: Any, *, loss: Callable[[Any], Tensor] | None = None, repeats: int = 5, warmup: int = 1
) -> Report:
    """Peak memory and time of a training step of `model`, in the mode (training or evaluation) it is in.

    Parameters, buffers, gradients and the state of the random numbers are left as they were.

    Args:
        model: any module with parameters to train.
        batch: its input: a tensor; a tuple or list of positional inputs; or a mapping of keyword inputs.
        loss: from the output to a scalar; None for the mean of squares over all floating-point tensors of the output.
        repeats: steps to time.
        warmup: steps before the first measurement.

    Raises:
        ValueError: if nothing in the model or the batch requires a gradient, or the loss is not a scalar.

    >>> report = measure(nn.Sequential(nn.Linear(100, 100), nn.Tanh()), torch.ones(50, 100))
    >>> report.held  # the Linear's output is not kept, the Tanh's is; and the loss
    20004
    >>> human(report.parameters)
    '40.4 kB'
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    device = next((t.device for t in [*model.parameters(), *tensors_of(batch)]), torch.device("cpu"))
    args, kwargs = as_call(batch)
    criterion = mean_of_squares if loss is None else loss
    outputs: list[Any] = []

    def forward() -> Tensor:
        output = model(*args, **kwargs)
        scalar = criterion(output)
        outputs[:] = [output]
        return _checked(scalar)

    def backward(scalar: Tensor) -> None:
        scalar.backward()
        outputs[:] = [_detached(outputs[0])]

    with _left_as_found(model, batch, device), torch.enable_grad():
        for _ in range(warmup):
            backward(forward())
        outputs.clear()
        memory = peak_memory(forward, backward, device=device)
        grown = system_growth(lambda: backward(forward()), device)
        times = interleave({"step": lambda: backward(forward())}, repeats, warmup=0, device=device)["step"]
    return Report(memory.peak, memory.held, bytes_of(model.parameters()), bytes_of(trained), times, outputs[0], grown)


def as_call(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """A batch as positional and keyword inputs."""
    if isinstance(batch, Mapping):
        return (), batch
    return (batch, {}) if isinstance(batch, tuple | list) else ((batch,), {})


def tensors_of(nested: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(nested, Tensor):
        return [nested]
    inside = nested.values() if isinstance(nested, Mapping) else nested if isinstance(nested, tuple | list) else ()
    return [t for value in inside for t in tensors_of(value)]


def _detached(nested: Any) -> Any:
    if isinstance(nested, Tensor):
        return nested.detach()
    if isinstance(nested, Mapping):
        return {name: _detached(value) for name, value in nested.items()}
    return type(nested)(map(_detached, nested)) if type(nested) in (tuple, list) else nested


def mean_of_squares(output: Any) -> Tensor:
    """A loss for any model: the mean of squares of each floating-point tensor that it returned, summed."""
    floats = [t for t in tensors_of(output) if t.is_floating_point()]
    if not floats:
        raise ValueError(f"the model returned no floating-point tensor but {type(output).__name__}; pass loss=.")
    return torch.stack([t.float().square().mean() for t in floats]).sum()


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss must return a scalar tensor; got {given}.")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on nothing that requires a gradient, so there is no training step to measure."
        )
    return loss


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors among these."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@contextmanager
def _left_as_found(model: nn.Module, batch: Any, device: torch.device) -> Iterator[None]:
    """Gradients of zeros to add to; afterwards the old ones again, as well as buffers and random state."""
    leaves = [t for t in [*model.parameters(), *tensors_of(batch)] if t.is_leaf and t.requires_grad]
    grads = [t.grad for t in leaves]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
