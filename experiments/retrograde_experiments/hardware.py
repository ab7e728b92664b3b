"""What a run ran on, in words, and of which commit, for the metrics."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch


@cache
def hardware(device: str) -> str:
    """The GPU's name, or the CPU's with its cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{_cpu()}, {os.cpu_count()} cores"


@cache
def commit() -> str | None:
    """The commit of the checkout that this package lies in, "+" at its end if files differ; RETROGRADE_COMMIT where there is no git."""
    folder, known = Path(__file__).parent, os.environ.get("RETROGRADE_COMMIT")
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "*.py"], cwd=folder, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return known
    return head.stdout.strip() + ("+" if changed.returncode else "")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
