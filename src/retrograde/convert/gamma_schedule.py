"""γ that moves during training: up from 0 over the first steps, or down to 0 over the last.

At γ = 0 a converted model is the plain one to the bit. A warm-up starts there, so that a pretrained network is not changed all at
once. A fall ends there, so that what has been trained is the plain network, which `revert` then gives back.

    γ(t) = share(t) · γ          share: through the given points, in straight lines or along cosines

Every γ on the way is a ratio of small integers, exactly reversible like any other. A smaller γ keeps more: 3 bits an element and
block at 1/8, 6.6 at 1/100, the smallest on the way to 0. At γ = 0 itself blocks are run again from their kept inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

from torch import nn

from ..arithmetic.ratio import as_ratios
from .convert import stages_of

SHAPES = {"linear": lambda t: t, "cosine": lambda t: (1 - math.cos(math.pi * t)) / 2}
_FINEST = 100  # denominators of γ on the way: a ratio with a small one has a small buffer


class GammaSchedule:
    """Moves γ of a converted model between 0 and the γ that it was converted with.

    Args:
        model: a converted model.
        points: by step, which share of its γ the model has then. It moves from point to point, and is constant before the
            first and after the last.
        shape: "linear" or "cosine" (slow at both ends), from point to point.

    >>> from retrograde.convert import convert
    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 6), gamma=0.9)
    >>> up = GammaSchedule(model, {0: 0, 3: 1})
    >>> str(up.gamma), [str(up.step()) for _ in range(4)]
    ('0', ['3/10', '3/5', '9/10', '9/10'])
    >>> down = GammaSchedule(model, {2: 1, 4: 0})
    >>> str(down.gamma), [str(down.step()) for _ in range(4)]
    ('9/10', ['9/10', '9/10', '9/20', '0'])
    """

    def __init__(self, model: nn.Module, points: Mapping[int, float], *, shape: str = "linear") -> None:
        if not isinstance(points, Mapping) or not points:
            raise ValueError(f"points must be shares of gamma by step, as {{0: 0, 500: 1}} to warm up; got {points!r}.")
        for step, share in points.items():
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"points: a step must be a whole number of at least 0; got {step!r}.")
            if not 0 <= share <= 1:
                raise ValueError(f"points: a share of gamma must lie in [0, 1]; got {share!r} at step {step}.")
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(map(repr, SHAPES))}; got {shape!r}.")
        stages = [stage for stage in stages_of(model) if not stage.checkpointed]
        if not stages:
            raise ValueError("the model is not converted: rg.convert(model, gamma=…) first.")
        if any(stage.recurrence.signed for stage in stages):
            raise ValueError(
                "GammaSchedule moves a gamma that is evaluated, too; with RandomSign the network is evaluated as the plain one from "
                "the first step on. Leave the schedule out, or convert with a number."
            )
        self.stages = [(stage, list(as_ratios(stage.settings.gamma, stage.steps))) for stage in stages]
        self.points = dict(sorted(points.items()))
        self.shape = shape
        self.t = 0
        self._set()

    @property
    def gamma(self) -> Fraction:
        """γ of the first step of the first stage, now."""
        return self.stages[0][0].recurrence.gammas[0]

    def step(self) -> Fraction:
        """Go one step on. Returns γ. Call it once per training step, between backward and the next forward."""
        self.t += 1
        self._set()
        return self.gamma

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: γ is not part of the model's."""
        return {"t": self.t, "points": dict(self.points), "shape": self.shape}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.t = state["t"]
        self.points = {int(step): share for step, share in state["points"].items()}  # JSON has no whole numbers as keys
        self.shape = state["shape"]
        self._set()

    def _share(self) -> float:
        steps = list(self.points)
        if self.t <= steps[0]:
            return self.points[steps[0]]
        for before, after in pairwise(steps):
            if self.t <= after:
                part = SHAPES[self.shape]((self.t - before) / (after - before))
                return self.points[before] + part * (self.points[after] - self.points[before])
        return self.points[steps[-1]]

    def _set(self) -> None:
        share = self._share()
        for stage, given in self.stages:
            gammas = given if share == 1 else [_simple(share * float(gamma)) for gamma in given]
            if gammas != list(stage.recurrence.gammas):
                stage.gamma = gammas


def _simple(gamma: float) -> Fraction:
    """The nearest ratio with a small denominator. It is 0 for 0 alone: a step at γ = 0 keeps every block's input."""
    if gamma in (0, 1):
        return Fraction(gamma)
    nearest = Fraction(gamma).limit_denominator(_FINEST)
    return min(max(nearest, Fraction(1, _FINEST)), 1 - Fraction(1, _FINEST))
