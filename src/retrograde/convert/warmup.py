"""γ from 0 to its final value over the first steps, so that a pretrained network is not changed all at once.

At γ = 0 a converted model is the plain one to the bit. From there γ grows step by step, and the weights follow:

    γ(t) = γ_final · t / steps          ("linear", or "cosine": slow at both ends)

Every γ on the way is a ratio of small integers, exactly reversible like any other; at γ = 0 itself blocks are run again from
their kept inputs.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from torch import nn

from ..extras import require
from .convert import stages_of
from .stage import Stage

SHAPES = {"linear": lambda t: t, "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2}


class GammaWarmup:
    """Raises γ of a converted model from `start` to its final value.

    Args:
        model: a converted model.
        steps: how many calls of `step` it takes.
        start: γ at first.
        shape: "linear" or "cosine".

    >>> from retrograde.convert import convert
    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 6), gamma=0.9)
    >>> warmup = GammaWarmup(model, steps=3)
    >>> [str(warmup.step()) for _ in range(4)]
    ['3/10', '3/5', '9/10', '9/10']
    """

    def __init__(self, model: nn.Module, steps: int, *, start: float = 0.0, shape: str = "linear") -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number of at least 1; got {steps!r}.")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(map(repr, SHAPES))}; got {shape!r}.")
        self.stages: list[tuple[Stage, list[Fraction]]] = [
            (stage, list(stage.recurrence.gammas)) for stage in stages_of(model) if not stage.checkpointed
        ]
        if not self.stages:
            raise ValueError("the model is not converted: rg.convert(model, gamma=…) first, with the final gamma.")
        if any(stage.recurrence.signed for stage, _ in self.stages):
            raise ValueError(
                "GammaWarmup raises a gamma that stays; with RandomSign the network is evaluated as the plain one from the first step "
                "on. Leave the warm-up out, or convert with a number."
            )
        if not 0 <= start <= 1:
            raise ValueError(f"start must be a gamma in [0, 1]; got {start!r}.")
        self.steps, self.start, self.shape, self.t = steps, start, shape, 0
        self._set()

    @property
    def gamma(self) -> Fraction:
        """γ of the first step of the first stage, now."""
        return self.stages[0][0].recurrence.gammas[0]

    def step(self) -> Fraction:
        """Go one step on; γ. Call it once per training step, between backward and the next forward."""
        if self.t < self.steps:
            self.t += 1
            self._set()
        return self.gamma

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: γ is not part of the model's."""
        return {"t": self.t, "steps": self.steps, "start": self.start, "shape": self.shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.t, self.steps, self.start, self.shape = state["t"], state["steps"], state["start"], state["shape"]
        self._set()

    def _set(self) -> None:
        part = SHAPES[self.shape](self.t / self.steps)
        for stage, final in self.stages:
            stage.gamma = final if part == 1 else [_simple(self.start + part * (float(g) - self.start)) for g in final]


def _simple(gamma: float) -> Fraction:
    """The nearest ratio with a small denominator: its buffer is small too."""
    return Fraction(gamma).limit_denominator(100)


def lightning_callback(steps: int, **options: Any) -> Any:
    """A Lightning callback that warms γ up over the first training steps of a module that contains a converted model.

    Its progress is part of Lightning's checkpoints.
    """
    callback = require("lightning").pytorch.callbacks.Callback

    class GammaWarmupCallback(callback):  # type: ignore[misc, valid-type]
        warmup: GammaWarmup | None = None
        saved: dict[str, Any] | None = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.warmup = GammaWarmup(module, steps, **options)
            if self.saved is not None:
                self.warmup.load_state_dict(self.saved)

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            assert self.warmup is not None
            self.warmup.step()

        def state_dict(self) -> dict[str, Any]:
            return {} if self.warmup is None else self.warmup.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.saved = state or None

    return GammaWarmupCallback()


def trainer_callback(steps: int, **options: Any) -> Any:
    """A Hugging Face `Trainer` callback that warms γ up over the first optimizer steps of a converted model.

    A resumed training goes on at the γ of its step.
    """
    callback = require("transformers").TrainerCallback

    class GammaWarmupCallback(callback):  # type: ignore[misc, valid-type]
        warmup: GammaWarmup | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.warmup = GammaWarmup(model, steps, **options)
            for _ in range(min(state.global_step, steps)):
                self.warmup.step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.warmup is not None
            self.warmup.step()

    return GammaWarmupCallback()
