"""What is in memory at the peak of a training step: every allocation that is alive then, by size and by who asked for it.

    python benchmarks/at_peak.py                                              # ResNet-1202, on a GPU
    python benchmarks/at_peak.py --cases L24 --methods checkpoint ours-reverse --top 8
    python benchmarks/at_peak.py --natives                                    # names PyTorch's own functions, too: slow

PyTorch's allocator writes down what it gives and takes back, with the Python lines (and, with `--natives`, the C++ functions) on
the stack. Allocations of one size by one line are counted together. Workspaces of libraries (cuDNN, cuBLAS) are among them: no
tensor shows those.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kernel_times import prepared
from retrograde.memory import human
from retrograde_bench.cases import SIZES, cases
from retrograde_bench.methods import choose
from retrograde_bench.step import training_step, zero_gradients

METHODS = ("momentumnet", "ours-auto", "ours-relu-auto")
_OWN = ("retrograde", "momentumnet", "torchvision", "retrograde_bench")  # packages whose lines say most
_CUDNN = ("cudnn", "cublas", "workspace", "Workspace")


def alive_at_peak(events: Iterable[Mapping[str, Any]]) -> tuple[int, list[Mapping[str, Any]]]:
    """The bytes that were alive at most, of what was allocated in these events of the allocator, and those allocations.

    >>> a, b, c = ({"action": "alloc", "addr": n, "size": n} for n in (1, 2, 4))
    >>> gone, other = ({"action": "free_completed", "addr": n} for n in (1, 9))
    >>> peak, alive = alive_at_peak([a, b, gone, c, other])
    >>> peak, alive == [b, c]
    (6, True)
    """
    alive, now, most, at_most = dict[int, Mapping[str, Any]](), 0, 0, list[Mapping[str, Any]]()
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            now += event["size"]
            if now > most:
                most, at_most = now, list(alive.values())
        elif event["action"] == "free_completed" and event["addr"] in alive:
            now -= alive.pop(event["addr"])["size"]
    return most, at_most


def asked_by(frames: Sequence[Mapping[str, Any]]) -> str:
    """Who asked: a library's workspace if one is named, the innermost of the lines that say most, the innermost of all."""
    names = [frame["name"] for frame in frames]
    for name in names:
        if any(word in name for word in _CUDNN):
            return name[:90]
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    telling = [frame for frame in python if any(f"/{package}/" in frame["filename"] for package in _OWN)]
    for frame in [*telling, *python][:1]:
        inner = python[0]
        at = f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
        return (
            at if inner is frame else f"{at} … {inner['filename'].rsplit('/', 1)[-1]}:{inner['line']} {inner['name']}"
        )
    return names[0][:90] if names else "?"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["resnet1202"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--top", type=int, default=14, help="lines to show of each method")
    parser.add_argument("--peers", help="folder that holds other packages")
    parser.add_argument("--natives", action="store_true", help="name C++ functions")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device here, and only its allocator keeps such a history.", file=sys.stderr)
        return 1
    if given.peers:
        sys.path.append(given.peers)
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for case in cases(given.size, given.cases):
        setup = prepared(case, device)
        for method in choose(case, given.methods):
            x = case.inputs(case.batch, device)
            zero_gradients(setup, x)
            step = training_step(method, method.build(setup), x, case)
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.memory._record_memory_history(
                "all", stacks="all" if given.natives else "python", max_entries=2_000_000
            )
            step()
            torch.cuda.synchronize()
            seen = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)
            peak, alive = alive_at_peak(seen)
            print(f"\n{case.title}, {method.name}: {human(peak)} at the peak, in {len(alive)} allocations", flush=True)
            groups = Counter[tuple[int, str]]((e["size"], asked_by(e.get("frames", ()))) for e in alive)
            for (size, who), count in sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[: given.top]:
                print(f"  {human(size * count):>9}  {count:5d} × {human(size):>9}  {who}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
