"""How far the outputs of a converted model are from those of the plain one, by γ. `gamma="auto"` is chosen by it.

    distance = max over the tensors of the output of ‖y_γ − y_0‖ / ‖y_0‖

Each γ is tried on a copy of the model that shares its parameters and has buffers of its own, without gradients, in the mode the model
is in, with the same random numbers. Hooks of the user do nothing in the copy. So a trial leaves no trace in the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..memory.fake import device_of, is_fake, no_trace, silence_hooks
from ..memory.step import as_call, tensors_of

AUTO = "auto"
CHOICES = tuple(Fraction(1, 2**k) for k in range(1, 9))
TOLERANCE = 0.2
"""The largest distance that `gamma="auto"` takes: on trained networks 1/16 to 1/4, where they lose little (docs/pretrained.md)."""


class Trial:
    """The plain outputs of a model on an example, and their distance from those at other γ.

    Args:
        converted: converts a copy of the model with a γ, in place.
        autocast: the dtype of automatic mixed precision; None: as it is set now.
    """

    def __init__(
        self, model: nn.Module, example: Any, converted: Callable[[nn.Module, Fraction], Any], autocast: torch.dtype | None = None
    ) -> None:  # fmt: skip
        self.model, self.converted, self.autocast = model, converted, autocast
        args, kwargs = as_call(example)
        self.example = tuple(args), dict(kwargs)
        self.known: dict[Fraction, float] = {}
        self.plain = self._outputs(None)
        if not self.plain:
            raise ValueError(
                "gamma='auto': the model returned no floating-point tensor to compare. Give gamma as a number."
            )

    def distance(self, gamma: Fraction) -> float:
        """How far the outputs at this γ are from the plain ones."""
        if gamma not in self.known:
            pairs = zip(self._outputs(gamma), self.plain, strict=True)
            self.known[gamma] = max(_distance(y, plain) for y, plain in pairs)
        return self.known[gamma]

    def nearest(self) -> Fraction:
        """The largest of 1/2, 1/4, … 1/256 that is near enough.

        Raises:
            ValueError: if none is. It names the distances.
        """
        for gamma in CHOICES:
            if self.distance(gamma) <= TOLERANCE:
                return gamma
        found = ", ".join(f"{gamma}: {self.distance(gamma):.2g}" for gamma in CHOICES)
        raise ValueError(
            f"gamma='auto': at no gamma do the outputs on the example stay within {TOLERANCE:g} of the plain model's. Relative "
            f"distances: {found}. Give gamma as a number, or gamma=0 with memory='checkpoint', which is the plain model to the bit."
        )

    def _outputs(self, gamma: Fraction | None) -> list[Tensor]:
        shared = {id(p): p for p in self.model.parameters()}
        try:
            model = copy.deepcopy(self.model, dict(shared))
        except Exception as error:
            raise ValueError(
                f"gamma='auto' tries each gamma on a copy of the model, and this {type(self.model).__name__} cannot be copied "
                f"({type(error).__name__}: {error}). Give gamma as a number."
            ) from error
        silence_hooks(model)
        if gamma is not None:
            self.converted(model, gamma)
        args, kwargs = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, self.example)
        device = device_of(model).type
        dtype = self.autocast or torch.get_autocast_dtype(device)
        enabled = self.autocast is not None or torch.is_autocast_enabled(device)
        with no_trace(), torch.no_grad(), torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
            return [t for t in tensors_of(model(*args, **kwargs)) if t.is_floating_point()]


def check_auto(gamma: str, model: nn.Module, example: Any) -> None:
    """Raise unless this is "auto", with an example to try it on."""
    if gamma != AUTO:
        raise ValueError(f"gamma must be a number in [0, 1], one per step, or {AUTO!r}; got {gamma!r}.")
    if example is None:
        raise ValueError("gamma='auto' tries the model on an example: rg.convert(model, example, gamma='auto').")
    args, kwargs = as_call(example)
    tensors = [*model.parameters(), *model.buffers(), *tensors_of((args, dict(kwargs)))]
    if any(is_fake(t) or t.is_meta for t in tensors):
        raise ValueError("gamma='auto' needs values, and the model or its example has none. Give gamma as a number.")


def _distance(y: Tensor, plain: Tensor) -> float:
    """‖y − plain‖ / ‖plain‖.

    >>> _distance(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    dtype = torch.float64 if plain.dtype == torch.float64 else torch.float32
    if torch.equal(y, plain):
        return 0.0
    apart, size = (float(torch.linalg.vector_norm(t.to(dtype))) for t in (y.to(dtype) - plain.to(dtype), plain))
    return apart / size if size else float("inf")
