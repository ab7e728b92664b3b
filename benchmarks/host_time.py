"""Where the host spends a step of ResNet-152 at batch 64, which is bound by it: the medians of docs/log.md.

    python benchmarks/host_time.py                                 # on a GPU
    python benchmarks/host_time.py --device cpu --repeats 3        # the small twin of the case
    python benchmarks/host_time.py --profile ours-relu-auto        # and where Python spends it, on one thread

Columns: forward and backward until the host has asked for all of it, the wait for the device, all of it; milliseconds, in turns.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from retrograde_bench.cases import Case, cases
from retrograde_bench.methods import Setup, choose
from retrograde_bench.step import zero_gradients

METHODS = (
    "plain",
    "checkpoint",
    "ours-reverse",
    "ours-checkpoint",
    "ours-store",
    "ours-relu-reverse",
    "ours-relu-auto",
    "ours-relu-unchecked",
)


def timed(case: Case, net: nn.Module, x: Tensor, wait: Callable[[], None]) -> tuple[float, float, float, float]:
    for p in net.parameters():
        p.grad = None
    start = time.perf_counter()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=case.autocast is not None):
        loss = net(x).float().square().mean()
    middle = time.perf_counter()
    loss.backward()
    asked = time.perf_counter()
    wait()
    end = time.perf_counter()
    return middle - start, asked - middle, end - asked, end - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--profile", nargs="*", default=[], choices=METHODS, metavar="METHOD")
    given = parser.parse_args(arguments)
    wait = torch.cuda.synchronize if given.device == "cuda" else lambda: None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case = cases("full" if given.device == "cuda" else "smoke", [f"resnet152-64-{'bf16' if given.bf16 else 'fp32'}"])[0]
    network = case.network().to(given.device).to(memory_format=torch.channels_last)
    x = case.inputs(case.batch, given.device)
    setup = Setup(case, network, 0.9, "inductor")
    zero_gradients(setup, x)
    nets = {method.name: method.build(setup) for method in choose(case, METHODS)}
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in nets}
    for turn in range(given.repeats + 2):  # two for whatever happens once
        for name, net in nets.items():
            taken = timed(case, net, x, wait)
            if turn > 1:
                rows[name].append(taken)
    for name, row in rows.items():
        print(f"{name:20}", *(f"{1e3 * statistics.median(column):8.2f}" for column in zip(*row, strict=True)))
    for name in given.profile:
        with torch.autograd.set_multithreading_enabled(False), cProfile.Profile() as profile:
            for _ in range(4):
                timed(case, nets[name], x, wait)
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
