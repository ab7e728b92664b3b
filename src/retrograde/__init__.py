"""Retrograde: train residual networks without storing their activations.

>>> import torch, retrograde as rg
>>> net = rg.MomentumNet([torch.nn.Linear(3, 3) for _ in range(5)], gamma=0.9)
>>> state = net.encode(torch.ones(2, 3))
>>> bool((net.inverse(state) == 1).all())
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .arithmetic.fixed import FixedPoint
from .convert import GammaSchedule, Plan, convert, deploy, plan, revert
from .errors import RangeOverflow, ReplayError
from .memory import measure
from .nets.momentum import MomentumNet, State
from .reverse.recurrence import RandomSign
from .settle import settle

if TYPE_CHECKING:
    from . import theory as theory

__version__ = "0.1.0"
__all__ = [
    "FixedPoint", "GammaSchedule", "MomentumNet", "Plan", "RandomSign", "RangeOverflow", "ReplayError", "State", "convert", "deploy",
    "measure", "plan", "revert", "settle",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "theory":  # it needs NumPy and SciPy, which the rest does not
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".theory", __name__)
