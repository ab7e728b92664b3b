"""What a GPU does with the steps and with attention: the bandwidths and the comparison of docs/log.md.

    python benchmarks/gpu_probe.py                               # both, on a GPU
    python benchmarks/gpu_probe.py bandwidth --block 512         # Triton's blocks of another size
    python benchmarks/gpu_probe.py attention --device cpu --width 32 --heads 2 --tokens 16 --batch 2

bandwidth: bytes that each step must read and write over its time, and the same of a plain copy.

attention: how many gradients of a stack of transformer layers differ between two runs that should be the same, by the backend of
attention: the plain network twice, memory="store" twice, memory="reverse" against "store". Where the first differs, the others may.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import retrograde as rg
from retrograde.core.ops import bodies
from retrograde.stack.graph import carry
from retrograde_bench.networks import Layer

KINDS = [(integers, floats) for integers in (torch.int32, torch.int16) for floats in (torch.float32, torch.bfloat16)]
BACKENDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default": nullcontext,
    "math": partial(sdpa_kernel, SDPBackend.MATH),
    "flash": partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
    "efficient": partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
}


def steps(
    size: int, integers: torch.dtype, floats: torch.dtype, device: str
) -> dict[str, tuple[Callable[[], Any], int]]:
    """The integer steps at γ = 0.9 as they run on the device, and the bytes per element of each. No time depends on the values."""
    x, v = (torch.randint(-1000, 1000, (size,), device=device, dtype=integers) for _ in range(2))
    i = torch.zeros(size, device=device, dtype=torch.uint8)
    y = (torch.randn(size, device=device) * 2.0**-9).to(floats)
    out, watch, run = torch.empty_like(y), torch.zeros(2, device=device), bodies(x)
    unit, guard = 2.0**-10, 3
    mask = torch.empty(-(-size // 8), device=device, dtype=torch.uint8)
    step, relu = ((y, floats, 9, 10, 0.1 / unit, unit, form, guard) for form in (1, 2))
    a, b = integers.itemsize, floats.itemsize
    return {
        "advance": (lambda: run.advance_(x, v, i, *step, out, watch), 4 * a + 2 + 2 * b),
        "advance with a relu": (lambda: run.advance_(x, v, i, *relu, out, watch, mask), 4 * a + 2 + 2 * b),
        "pull": (lambda: run.pull_(x, v, unit, guard, out), 3 * a + b),
        "retreat": (lambda: run.retreat_(x, v, i, *step, None), 3 * a + 2 + b),
        "retreat and pull": (lambda: run.retreat_(x, v, i, *step, out), 4 * a + 2 + 2 * b),
        "retreat and pull with a relu": (lambda: run.retreat_(x, v, i, *relu, out), 4 * a + 2 + 2 * b),
    }


def gradient_step(size: int, floats: torch.dtype, device: str, form: int = 1) -> tuple[Callable[[], Any], int]:
    p, h, d, gy, cast = (torch.randn(size, device=device).to(floats) for _ in range(5))
    mask = torch.randint(0, 256, (-(-size // 8),), device=device, dtype=torch.uint8) if form == 2 else None
    factors, faster = (9.0, 9.0, 10.0, 0.1, form), getattr(bodies(p), "carry", None)
    given = (p, h, d, factors, p, gy, gy if mask is None else cast, mask)

    def run() -> None:
        if faster is None or not faster(*given):
            carry(*given)

    return run, (5 if mask is None else 6) * floats.itemsize


def copying(size: int, device: str) -> tuple[Callable[[], Any], int]:
    a = torch.randn(size, device=device)
    b = torch.empty_like(a)
    return lambda: b.copy_(a), 8


@dataclass(frozen=True)
class Bandwidth:
    name: str
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.name:42s} {1e6 * self.seconds:9.1f} µs   {self.bytes / self.seconds / 1e12:.3f} TB/s"


def seconds(run: Callable[[], Any], device: str, repeats: int, warmup: int = 3) -> float:
    """The median; on a GPU by its own clock, for a launch takes a tenth of these times."""
    taken = []
    for _ in range(warmup + repeats):
        if torch.device(device).type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken[warmup:])


def bandwidths(size: int, device: str, repeats: int = 20) -> Iterator[Bandwidth]:
    def measured(name: str, run: Callable[[], Any], each: int) -> Bandwidth:
        return Bandwidth(name, seconds(run, device, repeats), each * size)

    yield measured("copy, float32", *copying(size, device))
    for integers, floats in KINDS:
        for name, (run, each) in steps(size, integers, floats, device).items():
            yield measured(f"{name}, {short(integers)}, {short(floats)}", run, each)
    for floats in (torch.float32, torch.bfloat16):
        yield measured(f"gradient step, {short(floats)}", *gradient_step(size, floats, device))
        yield measured(f"gradient step with a relu, {short(floats)}", *gradient_step(size, floats, device, 2))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stack:
    """Transformer layers, plain and as momentum networks on the same parameters, and their input."""

    blocks: list[nn.Module]
    x: Tensor

    @staticmethod
    def drawn(depth: int, width: int, heads: int, tokens: int, batch: int, device: str) -> Stack:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Layer(width, heads).to(device) for _ in range(depth)]
        return Stack(blocks, torch.randn(batch, tokens, width, device=device))

    def momentum(self, memory: str) -> nn.Module:
        return rg.MomentumNet(self.blocks, 0.9, form="block", memory=memory)

    def gradients(self, net: nn.Module, amp: bool, backend: Callable[[], AbstractContextManager[Any]]) -> list[Tensor]:
        """Of the input and of every parameter."""
        net.zero_grad()
        x = self.x.detach().requires_grad_()
        with backend():
            with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
                loss = net(x).float().square().mean()
            loss.backward()
        return [t.grad.clone() for t in (x, *net.parameters()) if t.grad is not None]


def differing(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    return sum(not torch.equal(p, q) for p, q in zip(a, b, strict=True))


def attention(stack: Stack, deterministic: bool, amp: bool, name: str) -> str:
    """One line: how many tensors differ, or why there is nothing to compare."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    plain, store, reverse = nn.Sequential(*stack.blocks), stack.momentum("store"), stack.momentum("reverse")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what has no deterministic body: that is what is looked for
            p1, p2, s1, s2, r = (
                stack.gradients(net, amp, BACKENDS[name]) for net in (plain, plain, store, store, reverse)
            )
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
    counts = (("plain/plain", p1, p2), ("store/store", s1, s2), ("reverse/store", r, s1))
    return ", ".join(f"{title} {differing(a, b)}" for title, a, b in counts) + f" of {len(p1)}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("bandwidth", "attention", "both"), default="both")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=64 * 512 * 1024, help="of the state (bandwidth)")
    parser.add_argument("--block", type=int, help="elements per program of the Triton kernels (bandwidth)")
    for name, value in {"depth": 6, "width": 1024, "heads": 16, "tokens": 512, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of the transformer (attention)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here: these figures are of one. --device cpu tries the script out.", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}", flush=True)
    if given.what != "attention":
        if given.block is not None and device.type == "cuda":
            from retrograde.kernels import cuda

            cuda.BLOCK = given.block
        for line in bandwidths(given.elements, given.device):
            print(line, flush=True)
    if given.what != "bandwidth":
        stack = Stack.drawn(given.depth, given.width, given.heads, given.tokens, given.batch, given.device)
        for deterministic in (False, True):
            for amp in (True, False):
                for backend in BACKENDS:
                    title = f"deterministic={deterministic}, {'bf16' if amp else 'fp32'}, {backend}"
                    print(f"{title:42s} {attention(stack, deterministic, amp, backend)}", flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product: for deterministic ones
    torch.backends.cuda.matmul.allow_tf32 = True
    sys.exit(main())
