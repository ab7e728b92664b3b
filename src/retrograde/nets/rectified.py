"""Momentum networks of blocks that end in a relu, which the steps form: those of the library's own ResNets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .momentum import Gamma, MomentumNet
from .relu import Rectified


class RectifiedNet(MomentumNet):
    """A momentum network of blocks that compute relu(x + f(x)): the steps ask them for f and form the sum and the relu, as with
    form="relu". A block that is not, or no longer, known to be one, or has hooks, runs as it is (`relu`).

    >>> from retrograde.nets.resnet import BasicBlock
    >>> net = RectifiedNet([BasicBlock(4, 4) for _ in range(3)], gamma=0.5)
    >>> net.form, net.recurrence.form
    ('block', 'relu')
    """

    def __init__(self, blocks: Iterable[nn.Module], gamma: Gamma = 0.9, **options: Any) -> None:
        super().__init__(blocks, gamma, form="block", **options)

    @property
    def _form_of_steps(self) -> str:
        return "relu"

    def _groups(self) -> tuple[Any, ...]:
        groups = super()._groups()
        if self.recurrence.form != "relu" or not any(self.recurrence.gammas):
            return groups
        return tuple(map(Rectified, groups))
