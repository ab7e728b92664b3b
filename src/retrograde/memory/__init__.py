"""Memory and time of training: measured, predicted, and kept within a budget.

units.py      bytes and seconds as people write and read them
peak.py       peak memory of any function, measured
timing.py     times of several functions, taken in turns
step.py       `measure`: memory and time of one training step
modes.py      what each memory mode keeps; memory plans, and stacks of blocks that have one; what `memory=` may be given
fake.py       a training step on a copy of the model whose tensors have no values
schedule.py   the memory of a step interval by interval, and what blocks may keep in it
budget.py     the plans of a network's stacks of blocks within a budget
"""

from .peak import Peak, held_bytes, peak_memory
from .step import Report, measure
from .timing import Times, interleave
from .units import duration, human

__all__ = ["Peak", "Report", "Times", "duration", "held_bytes", "human", "interleave", "measure", "peak_memory"]
