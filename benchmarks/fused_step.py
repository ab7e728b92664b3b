"""Does a compiler that fuses the integer step into the block's last kernel beat a kernel of its own? Forward passes only.

    python benchmarks/fused_step.py                               # small, on a CPU: two minutes
    python benchmarks/fused_step.py --device cuda --repeats 50    # ResNet 64×256×56², transformer 32×512×1024
    python benchmarks/fused_step.py --cases resnet --code out     # what was generated, to read

Every row takes one step, γ = 0.9, 32-bit state, 8-bit buffer, and returns the next block's input:

    compiled, then step    torch.compile of the block, then the registered `advance_`: what the library does
    fused, new state       block and step in one compiled function, the step in torch operations; x, v, i returned as new tensors
    fused, in place        the same, x, v, i overwritten
    eager, then step       the block as it is, then `advance_`
    compiled alone         the block without a step: what the others cost beyond this is the step

"eval" is without gradients; "train" runs the block as training does, with all that autograd saves for the backward pass. The
block is the end of a bottleneck (1×1 convolution, batch norm, residual, ReLU) or a pre-norm transformer layer, and computes
x + f(x), so the step subtracts x again. Of the compiled forward graph, as Inductor counts them: kernels (loops, or Triton kernels),
bytes read and written over elements of x, and float arrays of the size of x that generated code writes. The step moves 18 bytes for
x, v and i, and writes `out`; if y never reaches memory, `out` takes its place, and there is no array more than in the block alone.
"differ" counts elements of x, v, i, out and the watched maxima that are not those of `compiled, then step`. The step alone is
compared first. On a busy machine trust the best times; on a CPU several loops of one kernel may read the same bytes, counted once.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer

from retrograde.core import ops
from retrograde.memory import Times, interleave
from retrograde_bench.networks import Layer

N, D, GUARD, UNIT = 9, 10, 4, 2.0**-20
GAIN = 1 - N / D
SCALE = GAIN / UNIT * 2**GUARD
NEVER = 10**6
# By default Inductor writes out what several others read, and the step's parts are read by x, v, i and out.
OPTIONS: dict[str, Any] = {
    "realize_reads_threshold": NEVER,
    "realize_acc_reads_threshold": NEVER,
    "realize_opcount_threshold": NEVER,
}
BASELINE = "compiled, then step"
DTYPES = ("float32", "bfloat16")
Multiply = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def by_integers(v: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    """`core.multiply` in 32 bits, as in kernels/cuda.py; divisions by constants are left to the compiler to make products of."""
    i = i.int()
    rest = _div(i, N)
    q = torch.div(v, D, rounding_mode="floor")
    t = (v - q * D) * N + i - rest * N
    carry = _div(t, D)
    return q * N + carry, rest * D + t - carry * D


def by_floats(v: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a buffer below 2^15, as in kernels/cpu.py: CPUs have vectors of float64, but no division of integers."""
    i, shift = i.int(), 15 + N.bit_length()
    rest = (i * ((1 << shift) // N + 1)) >> shift
    u = i - rest * N
    q = torch.floor((v.double() * (N - D) + u.double() + 0.5) * (1 / D)).int()
    return v + q, u + (N - D) * v - q * D + rest * D


def _div(a: Tensor, b: int) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")  # of nothing negative here


def through(t: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values rounded to dtype. By their bits: Inductor leaves out conversions to bfloat16 and back."""
    if dtype == torch.float32:
        return t
    assert dtype == torch.bfloat16
    bits = t.view(torch.int32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(t == t, near, t)


def stepped(x: Tensor, v: Tensor, i: Tensor, y: Tensor, multiply: Multiply) -> tuple[Tensor, ...]:
    """New x, v, i, and the largest |v| and |x|: `advance_` in operations that a compiler can fuse."""
    f = through(y.float(), y.dtype) - through(x.float() * UNIT, y.dtype)
    step = torch.round(f * SCALE)
    good = step.abs() <= 2.0**30
    v, digits = multiply(v, i)
    v = v + torch.where(good, step, 0.0).int()
    x = x + ((v + (1 << (GUARD - 1))) >> GUARD)
    peaks = torch.where(good, v.float().abs(), step.abs()), x.float().abs()
    # over channels first: a reduction along rows of memory can share a kernel with what is written, one over everything cannot
    rows = [peak.movedim(1, -1) if peak.dim() == 4 else peak for peak in peaks]
    return x, v, digits.to(i.dtype), torch.stack([row.amax(-1).amax() for row in rows])


class Decoded(torch.autograd.Function):
    """x as a float; its gradient goes to y, as that of a step from v = 0 does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor) -> Tensor:
        return (x.float() * UNIT).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * GAIN, None


class Tail(nn.Module):
    """The end of a bottleneck block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels // 4, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(h)) + x)


@dataclass(frozen=True)
class Case:
    """A block, its inputs, and the integer state before its step, of which inputs[0] is the decoded x."""

    name: str
    block: nn.Module
    inputs: list[Tensor]
    state: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def drawn(name: str, block: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
        layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        x = torch.round(torch.randn(shape, device=device).abs() / UNIT).int().to(memory_format=layout)
        v = torch.randint_like(x, -(2**22), 2**22)
        i = torch.randint_like(x, 0, 200).to(torch.uint8)
        inputs = [(x * UNIT).to(dtype)]
        if isinstance(block, Tail):
            h = torch.randn(shape[0], shape[1] // 4, *shape[2:], device=device).relu()
            inputs.append(h.to(dtype, memory_format=layout))
        title = f"{name}, {'×'.join(map(str, shape))}, {str(dtype).removeprefix('torch.')}"
        return Case(title, block.to(device, dtype, memory_format=layout), inputs, (x, v, i))  # type: ignore[call-overload]

    def copies(self) -> list[Tensor]:
        return [t.clone() for t in self.state]


def cases(given: argparse.Namespace) -> Iterator[Case]:
    (batch, channels, side), (_, _, width) = given.images, given.texts
    for dtype in (getattr(torch, name) for name in given.dtypes):
        if "resnet" in given.cases:
            yield Case.drawn("bottleneck tail", Tail(channels), (batch, channels, side, side), dtype, given.device)
        if "transformer" in given.cases and dtype == torch.bfloat16:
            layer = Layer(width, max(1, width // 64))
            yield Case.drawn("transformer layer", layer, tuple(given.texts), dtype, given.device)


def advanced(x: Tensor, v: Tensor, i: Tensor, y: Tensor, body: Any = None) -> tuple[Tensor, Tensor]:
    """The step by the operator's body: out, and the peaks; x, v, i are overwritten."""
    out, watch = torch.empty_like(x, dtype=y.dtype), torch.zeros(2, device=x.device)
    (body or ops.bodies(x)).advance_(x, v, i, y.detach(), y.dtype, N, D, SCALE, UNIT, True, GUARD, out, watch)
    return out, watch


def apart(block: Callable[..., Tensor], inputs: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Block, then step: x, v, i, out, peaks; last y, which holds what autograd saved."""
    x, v, i = state
    y = block(*inputs)
    return (x, v, i, *advanced(x, v, i, y), y)


def fused(block: Callable[..., Tensor], multiply: Multiply, in_place: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The same in one function, to be compiled. y is not returned."""

    def run(inputs: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        y = block(*inputs)
        with torch.no_grad():
            x, v, i, peaks = stepped(state[0], state[1], state[2], y.detach(), multiply)
        out = Decoded.apply(y, x)
        if not in_place:
            return x, v, i, out, peaks
        for old, new in zip(state, (x, v, i), strict=True):
            old.copy_(new)
        return (*state, out, peaks)

    return run


@dataclass
class Graph:
    """What Inductor says of a forward graph."""

    kernels: int = 0
    bytes: int = 0
    floats: list[int] = field(default_factory=list)  # sizes of the float arrays that generated code writes


def written(graph: GraphLowering) -> list[int]:
    """Sizes of the floating-point arrays that generated code writes to memory, the graph's outputs among them."""
    made = [b for b in graph.buffers if isinstance(b, ComputedBuffer) and b.get_name() not in graph.removed_buffers]
    return [math.prod(map(int, b.get_size())) for b in made if b.get_dtype().is_floating_point]


@contextmanager
def counted() -> Iterator[Graph]:
    """The forward graph compiled meanwhile."""
    found, original, log = (
        Graph(),
        GraphLowering.count_bytes,
        logging.getLogger(f"{compile_fx.__name__}.__inductor_metrics"),
    )
    metrics.reset()

    def count(graph: GraphLowering) -> Any:
        result = original(graph)
        if not graph.is_backward:
            found.bytes += result[0]
            found.kernels += metrics.generated_kernel_count
            found.floats += written(graph)
        metrics.generated_kernel_count = 0
        return result

    level = log.level
    log.setLevel(logging.INFO)  # Inductor counts for this log alone
    try:
        with mock.patch.object(GraphLowering, "count_bytes", count), mock.patch.object(log, "propagate", False):
            yield found
    finally:
        log.setLevel(level)


def step_differs(case: Case, multiply: Multiply) -> int:
    """Elements in which the compiled step alone is not the plain-torch definition's, or the registered body's."""
    y = torch.empty_like(case.inputs[0]).copy_(case.inputs[0].roll(1, 0))
    (x, v, i), (a, b, c) = case.copies(), case.copies()
    exact, registered = [x, v, i, *advanced(x, v, i, y, ops)], [a, b, c, *advanced(a, b, c, y)]
    x, v, i, peaks = torch.compile(stepped, dynamic=False, options=OPTIONS)(*case.state, y, multiply)
    compiled = [x, v, i, (x.float() * UNIT).to(y.dtype), peaks]
    return differing(compiled, exact) + differing(registered, exact)


def differing(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    return sum(0 if torch.equal(p, q) else int((p != q).sum()) for p, q in zip(a, b, strict=True))


@dataclass(frozen=True)
class Row:
    """arrays: floating-point arrays of the size of x that generated code writes."""

    name: str
    times: Times
    baseline: Times
    kernels: int | None = None
    bytes: float | None = None
    arrays: int | None = None
    differ: int | None = None

    def cells(self) -> list[str]:
        counts = (self.kernels, None if self.bytes is None else round(self.bytes, 1), self.arrays, self.differ)
        median, best = self.times.median, self.times.min
        spent = [f"{1e3 * median:.3f}", f"{self.times.ratio(self.baseline):.3f}"]
        spent += [f"{1e3 * best:.3f}", f"{best / self.baseline.min:.3f}"]
        return [self.name, *("–" if count is None else str(count) for count in counts), *spent]


def measured(case: Case, train: bool, multiply: Multiply, repeats: int, code: Path | None = None) -> list[Row]:
    """All rows of one case in one mode, timed in turns."""
    torch._dynamo.reset()
    block, device = case.block.train(train), case.inputs[0].device
    inputs = [case.inputs[0].detach().requires_grad_(train), *case.inputs[1:]]
    alone = torch.compile(block, dynamic=False)
    compiled: dict[str, Callable[..., Any]] = {
        "compiled alone": lambda inputs, state: alone(*inputs),
        "fused, new state": torch.compile(fused(block, multiply, False), dynamic=False, options=OPTIONS),
        "fused, in place": torch.compile(fused(block, multiply, True), dynamic=False, options=OPTIONS),
    }
    runs: dict[str, Callable[..., Any]] = {
        BASELINE: partial(apart, alone),
        **{name: compiled[name] for name in ("fused, new state", "fused, in place")},
        "eager, then step": partial(apart, block),
        "compiled alone": compiled["compiled alone"],
    }
    graphs, differ = {}, {}
    with torch.set_grad_enabled(train):
        for name, run in compiled.items():
            with counted() as graphs[name], kept(code, f"{case.name}, {train=}, {name}"):
                run(inputs, case.copies())
        exact = apart(alone, inputs, case.copies())[:5]
        for name in compiled.keys() - {"compiled alone"}:
            differ[name] = differing(compiled[name](inputs, case.copies()), exact)
        del exact
        state = case.copies()  # moves on with the repeats towards y, and stays in range; no time depends on it
        times = interleave({name: partial(run, inputs, state) for name, run in runs.items()}, repeats, device=device)
    size, rows = case.state[0].numel(), []
    for name, taken in times.items():
        row = Row(name, taken, times[BASELINE], differ=differ.get(name))
        graph = graphs.get(name)
        if graph is not None and graph.bytes:
            row = replace(row, kernels=graph.kernels, bytes=graph.bytes / size, arrays=graph.floats.count(size))
        rows.append(row)
    return rows


@contextmanager
def kept(folder: Path | None, name: str) -> Iterator[None]:
    """Write the code that is generated meanwhile into the folder."""
    if folder is None:
        yield
        return
    sources: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", sources.append):
        yield
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.py").write_text("\n\n".join(sources))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("  ".join(line) for line in lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=("resnet", "transformer"), default=["resnet", "transformer"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="the transformer: bfloat16 alone")
    parser.add_argument("--modes", nargs="+", choices=("eval", "train"), default=["eval", "train"])
    parser.add_argument("--images", nargs=3, type=int, metavar=("BATCH", "CHANNELS", "SIDE"))
    parser.add_argument("--texts", nargs=3, type=int, metavar=("BATCH", "TOKENS", "WIDTH"))
    parser.add_argument("--division", choices=("integers", "floats"), help="default: floats on a CPU, else integers")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--code", type=Path, help="a folder for the generated code")
    given = parser.parse_args(arguments)
    small = torch.device(given.device).type == "cpu"
    given.images = given.images or ((8, 64, 28) if small else (64, 256, 56))
    given.texts = given.texts or ((4, 64, 256) if small else (32, 512, 1024))
    given.division = given.division or ("floats" if small else "integers")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    torch.manual_seed(0)
    multiply = by_floats if given.division == "floats" else by_integers
    device = torch.device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, division by {given.division}", flush=True)
    wrong = 0
    # graphs from a cache are not counted
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        for case in cases(given):
            wrong += (alone := step_differs(case, multiply))
            print(f"\n{case.name}: the step alone differs in {alone}")
            for mode in given.modes:
                rows = measured(case, mode == "train", multiply, given.repeats, given.code)
                wrong += sum(row.differ or 0 for row in rows)
                header = [mode, "kernels", "B/element", "arrays", "differ", "median, ms", "×", "best, ms", "×"]
                print(aligned([header, *(row.cells() for row in rows)]), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = True
    sys.exit(main())
