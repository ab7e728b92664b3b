"""From any residual model to a momentum network, in place.

block.py      one converted block: the same object, another class
stage.py      a run of blocks as one momentum network, driven by the model's own loop
find.py       which blocks: by what is known of their classes (adapters/), or by name
probe.py      which blocks: by trying the model out on an example
convert.py    convert, revert
plan.py       plan: what would be converted, and what that would save, predicted
warmup.py     γ from 0 to its final value over the first steps
"""

from .convert import convert, revert
from .plan import Plan, plan
from .warmup import GammaWarmup, lightning_callback, trainer_callback

__all__ = ["GammaWarmup", "Plan", "convert", "lightning_callback", "plan", "revert", "trainer_callback"]
