"""What happens inside one training step of a method.

    allocations   what is in memory at the peak: every allocation that is alive then, by size and by who asked for it; CUDA
    kernels       time of each kernel (on a CPU: of each operator), by `torch.profiler`
    host          time of the host: forward, backward, the wait for the device

Allocations of one size by one line are counted together. Workspaces of libraries (cuDNN, cuBLAS) are among them: no tensor shows
those.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from retrograde_experiments.private import human

from .cases import Case
from .methods import BASELINE, Method, Setup, method
from .step import Step, memory, training_step, zero_gradients

LOOKS = ("allocations", "kernels", "host")
_OWN = ("retrograde", "momentumnet", "torchvision", "retrograde_bench")  # packages whose lines say most
_LIBRARIES = ("cudnn", "cublas", "workspace", "Workspace")
_WARM_UP = 2  # whatever happens once: calibration, compilation


def look(
    kind: str, case: Case, methods: Sequence[Method], device: torch.device, repeats: int = 12, top: int = 16
) -> Iterator[str]:
    """Lines for people.

    Raises:
        ValueError: for another kind, or for allocations on a CPU, which keeps no history of them.
    """
    if kind not in LOOKS:
        raise ValueError(f"what to look at must be one of {', '.join(LOOKS)}; got {kind!r}.")
    if kind == "allocations" and device.type != "cuda":
        raise ValueError("only the allocator of a CUDA device keeps a history of allocations.")
    torch.manual_seed(0)
    network = case.network().to(device)
    if case.planes:
        network.to(memory_format=case.layout)  # type: ignore[call-overload]
    setup = Setup(case, network, 0.9, "inductor")
    x = case.inputs(case.batch, device)
    zero_gradients(setup, x)
    if any(found.share is not None for found in methods):
        setup.peaks[BASELINE] = memory(_ready(method(BASELINE), setup, x), device).peak
    if kind == "host":
        yield from _host({found.name: _ready(found, setup, x) for found in methods}, device, repeats)
        return
    for found in methods:
        step = _ready(found, setup, x)
        groups = kernels(step, device) if kind == "kernels" else allocations(step)
        unit = (lambda ms: f"{ms:.1f} ms") if kind == "kernels" else human
        total, count = sum(amount for _, amount in groups.values()), sum(n for n, _ in groups.values())
        yield f"\n{case.title}, {found.name}: {unit(total)} in {count}"
        for name, (n, amount) in sorted(groups.items(), key=lambda item: -item[1][1])[:top]:
            yield f"  {unit(amount):>10}  {n:5d} ×  {name[:110]}"


def _ready(found: Method, setup: Setup, x: Tensor) -> Step:
    step = training_step(found, found.build(setup), x, setup.case)
    for _ in range(_WARM_UP):
        step()
    return step


def kernels(step: Step, device: torch.device) -> dict[str, tuple[int, float]]:
    """By kernel: how often it ran in a step, and for how many ms in all."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as seen:
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


def allocations(step: Step) -> dict[str, tuple[int, float]]:
    """By who asked, and how much at a time: how many allocations were alive at the peak, and their bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=2_000_000)
    step()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    _, alive = alive_at_peak(events)
    groups = Counter[tuple[int, str]]((event["size"], asked_by(event.get("frames", ()))) for event in alive)
    return {f"{human(size):>9}  {who}": (count, float(size * count)) for (size, who), count in groups.items()}


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
    """Who asked: a library's workspace if one is named, else the innermost of the lines that say most, else the innermost of all."""
    names = [frame["name"] for frame in frames]
    for name in names:
        if any(word in name for word in _LIBRARIES):
            return name[:90]
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    telling = [frame for frame in python if any(f"/{package}/" in frame["filename"] for package in _OWN)]
    for frame in [*telling, *python][:1]:
        at = _line(frame)
        return at if python[0] is frame else f"{at} … {_line(python[0])}"
    return names[0][:90] if names else "?"


def _line(frame: Mapping[str, Any]) -> str:
    return f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"


def _host(steps: Mapping[str, Step], device: torch.device, repeats: int) -> Iterator[str]:
    """Medians in ms, the methods in turns."""
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
    for turn in range(repeats + _WARM_UP):
        for name, step in steps.items():
            start = time.perf_counter()
            kept = step.forward()
            middle = time.perf_counter()
            step.backward(kept)
            asked = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            end = time.perf_counter()
            if turn >= _WARM_UP:
                rows[name].append((middle - start, asked - middle, end - asked, end - start))
    yield f"{'ms':44}{'forward':>10}{'backward':>10}{'wait':>10}{'whole':>10}"
    for name, row in rows.items():
        yield f"{name:44}" + "".join(f"{1e3 * statistics.median(column):10.2f}" for column in zip(*row, strict=True))
