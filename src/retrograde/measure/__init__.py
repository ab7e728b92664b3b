"""Memory and time of training, measured: nothing sampled, nothing estimated."""

from .memory import Peak, held_bytes, peak_memory
from .step import Report, measure
from .timing import Times, interleave
from .units import duration, human

__all__ = ["Peak", "Report", "Times", "duration", "held_bytes", "human", "interleave", "measure", "peak_memory"]
