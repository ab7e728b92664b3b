"""What `verify` costs on a CPU: processor time of a training step, each setting against "off", in turns.

python benchmarks/verify_cost.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import retrograde as rg

STEPS, FIRST = 40, 4  # how many are taken, and how many of them do not count
SETTINGS = ("off", "auto", "end")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 500, bias=False))


def conv() -> nn.Module:
    parts = [[nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)] for _ in range(2)]
    return nn.Sequential(*parts[0], nn.ReLU(), *parts[1])


def cases() -> Iterator[tuple[str, list[nn.Module], Tensor]]:
    yield "MLP, 500 × 500, depth 16", [mlp() for _ in range(16)], torch.randn(500, 500)
    yield "conv + BatchNorm, 8 × 32 × 32², depth 8", [conv() for _ in range(8)], torch.randn(8, 32, 32, 32)


def measured(blocks: list[nn.Module], x: Tensor, memory: str) -> dict[str, list[float]]:
    """Seconds of each step, by setting."""
    nets = {verify: rg.MomentumNet(blocks, memory=memory, verify=verify) for verify in SETTINGS}
    times: dict[str, list[float]] = {verify: [] for verify in SETTINGS}
    for k in range(STEPS):
        for verify in (*SETTINGS[k % 3 :], *SETTINGS[: k % 3]):
            nets[verify].zero_grad()
            start = time.process_time()
            nets[verify](x).square().mean().backward()
            times[verify].append(time.process_time() - start)
    return {verify: seconds[FIRST:] for verify, seconds in times.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, blocks, x in cases():
        for memory in ("reverse", "checkpoint"):
            times = measured(blocks, x, memory)
            off = statistics.median(times["off"])
            for verify in SETTINGS[1:]:
                ratios = [a / b for a, b in zip(times[verify], times["off"], strict=True)]
                median, paired = statistics.median(times[verify]), statistics.median(ratios)
                print(f"{name}, {memory}: off {1e3 * off:.1f} ms, {verify} {1e3 * median:.1f} ms: ", end="")
                print(f"medians {100 * median / off - 100:+.1f} %, paired {100 * paired - 100:+.1f} %", flush=True)
