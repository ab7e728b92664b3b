"""From any residual model to a momentum network, in place.

convert.py        convert, revert
checkpointing.py  what takes the place of a model's own checkpointing
saved.py          γ in the config of a transformers model
deploy.py         deploy: the converted model in floats
split.py          a layer in parts: attention and MLP as steps of their own; sums: where it adds to x
stage.py          a run of blocks as one momentum network, driven by the model's own loop
block.py          one converted block: the same object, another class, and its own forward as steps call it
caches.py         key-value caches, a copy for each run of a block
next_x.py         how a block knows the x that the one before handed on; branch: what blocks of form "branch" return
find.py           which blocks: by what is known of their classes, or by name
adapters.py       what is known of the classes of torchvision, timm, transformers and PyTorch
probe.py          which blocks: by trying the model out on an example
schedule.py       what the stages of one model keep, within a budget
distance.py       how far outputs move with γ; gamma="auto"
plan.py           plan: what would be converted, and what that would save
gamma_schedule.py γ that moves during training
"""

from .convert import convert, revert
from .deploy import deploy
from .gamma_schedule import GammaSchedule
from .plan import Plan, plan

__all__ = ["GammaSchedule", "Plan", "convert", "deploy", "plan", "revert"]
