"""Retrograde: train residual networks without storing their activations.

>>> import torch, retrograde as rg
>>> net = rg.MomentumNet([torch.nn.Linear(3, 3) for _ in range(5)], gamma=0.9)
>>> state = net.encode(torch.ones(2, 3))
>>> bool((net.inverse(state) == 1).all())
True
"""

from . import kernels as kernels
from . import theory as theory
from .convert import GammaWarmup, Plan, convert, plan, revert
from .core.errors import RangeOverflow, ReplayError
from .memory import measure
from .nets.momentum import MomentumNet, State
from .settle import settle

__version__ = "0.1.0"
__all__ = [
    "GammaWarmup", "MomentumNet", "Plan", "RangeOverflow", "ReplayError", "State", "convert", "measure", "plan", "revert", "settle",
    "theory",
]  # fmt: skip
