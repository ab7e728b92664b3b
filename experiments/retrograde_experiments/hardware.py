"""What a run ran on, in words, for the metrics."""

from __future__ import annotations

import os
import platform
from functools import cache

import torch


@cache
def hardware(device: str) -> str:
    """The GPU's name, or the CPU's with its cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{_cpu()}, {os.cpu_count()} cores"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
