"""What the checks of every replay cost: steps with verify="auto" and with "off", by turns, in processor time.

python tests/hazards/cost.py                     # an MLP, a convolutional network, a transformer; reverse and checkpoint

Of each pair of steps the ratio is taken; shown are the median, and the range in which it lies with 95 % confidence.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn

import retrograde as rg

MODES = ("reverse", "checkpoint")


def mlp() -> tuple[list[nn.Module], str, Tensor]:
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(12)]
    return [*blocks], "branch", torch.randn(256, 512)


def conv() -> tuple[list[nn.Module], str, Tensor]:
    def block() -> nn.Module:
        first = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        return nn.Sequential(*first, nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))

    return [block() for _ in range(8)], "branch", torch.randn(8, 64, 32, 32)


def transformer() -> tuple[list[nn.Module], str, Tensor]:
    layer = {"dropout": 0.1, "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(256, 4, 1024, **layer) for _ in range(6)]  # type: ignore[arg-type]
    return [*blocks], "block", torch.randn(4, 128, 256)


NETWORKS = {"MLP": mlp, "conv net": conv, "transformer": transformer}


def ratios(name: str, memory: str, seconds: float) -> tuple[list[float], float]:
    """Of each pair of steps, checked over unchecked; and the median seconds of an unchecked one."""
    torch.manual_seed(0)
    blocks, form, x = NETWORKS[name]()
    net = rg.MomentumNet(blocks, form=form, memory=memory)

    def step(verify: str) -> float:
        net.verify = verify
        start = time.process_time()
        net(x).square().mean().backward()
        return time.process_time() - start

    for verify in ("auto", "off") * 2:
        step(verify)
    found, plain, end, turn = list[float](), list[float](), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        turn += 1
        taken = {verify: step(verify) for verify in (("auto", "off") if turn % 2 else ("off", "auto"))}
        found.append(taken["auto"] / taken["off"])
        plain.append(taken["off"])
    return found, sorted(plain)[len(plain) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for each network and mode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in NETWORKS:
        for memory in MODES:
            found, plain = ratios(name, memory, options.seconds)
            found.sort()
            n, spread = len(found), 0.98 * len(found) ** 0.5  # of the median's place in order
            low, high = found[max(int(n / 2 - spread), 0)], found[min(int(n / 2 + spread), n - 1)]
            median = f"{100 * (found[n // 2] - 1):+.2f} % ({100 * (low - 1):+.2f} … {100 * (high - 1):+.2f})"
            print(f"{name}, {memory}: {median} of {1000 * plain:.0f} ms, {n} pairs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
