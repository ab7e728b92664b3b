"""Kernel time of one training step by kernel, for methods of the benchmark: where the time over checkpointing goes.

python benchmarks/kernel_times.py                                     # the table in docs/log.md, on a GPU
python benchmarks/kernel_times.py --cases 320 --methods checkpoint ours-reverse --top 12
python benchmarks/kernel_times.py --size smoke --device cpu           # operators instead of kernels, small twins
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from retrograde_bench.cases import SIZES, Case, cases
from retrograde_bench.methods import BASELINE, Method, Setup, choose
from retrograde_bench.step import peak, training_step, zero_gradients

METHODS = ("checkpoint", "ours-reverse", "ours-branch-reverse", "ours-16bit-reverse")


def kernel_times(method: Method, setup: Setup, device: torch.device) -> dict[str, tuple[int, float]]:
    """By kernel (on a CPU: by operator): how often it ran in a step, and for how many ms in all."""
    x = setup.case.inputs(setup.case.batch, device)
    zero_gradients(setup, x)
    step = training_step(method, method.build(setup), x, setup.case)
    for _ in range(2):  # whatever happens once: calibration, compilation
        step()
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as seen:
        step()
        if cuda:
            torch.cuda.synchronize(device)
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in seen.events() or ():
        if event.device_type == (DeviceType.CUDA if cuda else DeviceType.CPU):
            count, ms = found[event.name]
            spent = event.device_time_total if cuda else event.self_cpu_time_total
            found[event.name] = count + 1, ms + spent / 1e3
    return dict(found)


def prepared(case: Case, device: torch.device) -> Setup:
    torch.manual_seed(0)
    network = case.network().to(device)
    if case.images:
        network.to(memory_format=case.layout)  # type: ignore[call-overload]
    return Setup(case, network, 0.9, "inductor")


def measure_baseline(setup: Setup, device: torch.device) -> None:
    """Have the peak that budgets are shares of."""
    (baseline,) = choose(setup.case, [BASELINE])
    x = setup.case.inputs(setup.case.batch, device)
    zero_gradients(setup, x)
    step = training_step(baseline, baseline.build(setup), x, setup.case)
    step()
    setup.peaks[BASELINE] = peak(step, device)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["L24", "L96-fp32", "320"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--top", type=int, default=22, help="kernels to show of each method")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("There is no CUDA device here: use --device cpu --size smoke to try this out.", file=sys.stderr)
        return 1
    device = torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for case in cases(given.size, given.cases):
        setup, chosen = prepared(case, device), choose(case, given.methods)
        if any(method.budget is not None for method in chosen):
            measure_baseline(setup, device)
        for method in chosen:
            found = kernel_times(method, setup, device)
            total, count = sum(ms for _, ms in found.values()), sum(n for n, _ in found.values())
            print(f"\n{case.title}, {method.name}: {total:.1f} ms in {count} launches", flush=True)
            for name, (n, ms) in sorted(found.items(), key=lambda item: -item[1][1])[: given.top]:
                print(f"  {ms:9.2f} ms  {n:5d} ×  {name[:110]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
