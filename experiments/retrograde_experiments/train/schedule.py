"""The learning rate as a function of the step alone: there is no state to save, and none to get wrong."""

from __future__ import annotations

import math

from .setting import Recipe


def efolds(recipe: Recipe, steps: int) -> float:
    """By how many factors of e weight decay shrinks a parameter that has no gradient, with `steps` steps in an epoch. To first order in
    rate · decay: where that is not far below (1 − momentum)², the parameter shrinks faster.

    >>> round(efolds(Recipe(), 390), 2)
    3.59
    """
    total = sum(rate_at(recipe, step, steps) for step in range(recipe.epochs * steps))
    return recipe.weight_decay * total / (1 - recipe.momentum)


def rate_at(recipe: Recipe, step: int, steps: int) -> float:
    """The rate of a step, counted from 0, with `steps` of them in an epoch.

    >>> paper = Recipe()
    >>> [rate_at(paper, epoch * 390, 390) for epoch in (0, 179, 180)]
    [0.01, 0.01, 0.001]
    >>> short = Recipe(epochs=10, rate=0.4, schedule="onecycle")
    >>> [round(rate_at(short, step, 10), 3) for step in (0, 15, 29, 30, 65, 99)]
    [0.013, 0.213, 0.4, 0.4, 0.2, 0.0]
    """
    total = recipe.epochs * steps
    warmup = recipe.warmup or (0.3 * recipe.epochs if recipe.schedule == "onecycle" else 0)
    up = round(warmup * steps)
    if step < up:
        return recipe.rate * (step + 1) / up
    if recipe.schedule == "multistep":
        return recipe.rate * recipe.factor ** sum(step >= milestone * steps for milestone in recipe.milestones)
    if recipe.schedule == "constant":
        return recipe.rate
    return recipe.rate * (1 + math.cos(math.pi * (step - up) / max(1, total - up))) / 2
