"""A training step on a CPU: time and peak memory of momentum networks, against checkpointing the plain network.

    conv   f = conv-bn-relu-conv-bn on 32×64×32×32 float32
    mlp    f = W2ᵀ tanh(W1 x + b), d = 500, 500 hidden, batch 500      [sander2021, Sec. 3.2]

Times are taken in turns in one process. Peak memory is that of a fresh process for each figure, in two ways: growth of the
resident memory, as the system counts it, and the most that PyTorch's allocator had given out. Model, data, gradients and
libraries are there before the step that is measured: a warm-up on two rows of the batch has seen to that. Resident memory
includes what malloc cannot reuse (MALLOC_MMAP_THRESHOLD_=131072 in the environment makes it give back more). The reference
package (momentumnet 0.10) takes part where it is installed.

    python benchmarks/cpu_step.py --write
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.memory import human, interleave, peak_memory

BASELINE = "checkpoint (plain network)"
TIED_DEPTHS = (20, 40, 80)
RESULTS = Path(__file__).parent / "results"


class Mlp(nn.Module):
    """f(x) = W2ᵀ tanh(W1 x + b)."""

    def __init__(self, d: int = 500, hidden: int = 500) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(d, hidden), nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def conv_block(width: int = 64) -> nn.Module:
    def conv() -> nn.Module:
        return nn.Conv2d(width, width, 3, padding=1, bias=False)

    return nn.Sequential(conv(), nn.BatchNorm2d(width), nn.ReLU(), conv(), nn.BatchNorm2d(width))


@dataclass(frozen=True)
class Case:
    """A kind of block, the shape of its input, and the depths at which time and memory are measured."""

    block: Callable[[], nn.Module]
    shape: tuple[int, ...]
    timed: int
    deep: int


CASES = {"conv": Case(conv_block, (32, 64, 32, 32), 16, 48), "mlp": Case(Mlp, (500, 500), 50, 400)}


class Residual(nn.Module):
    """x ← x + f(x), each block run by `call`."""

    def __init__(self, blocks: list[nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(blocks), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.call(block, x)
        return x


def momentum(memory: str) -> Callable[[list[nn.Module], float], nn.Module]:
    return lambda blocks, gamma: rg.MomentumNet(blocks, gamma, memory=memory)


def reference(blocks: list[nn.Module], gamma: float) -> nn.Module:
    from momentumnet import MomentumNet

    return MomentumNet(blocks, gamma, use_backprop=False)


METHODS: dict[str, Callable[[list[nn.Module], float], nn.Module]] = {
    "plain": lambda blocks, gamma: Residual(blocks, lambda f, x: f(x)),
    BASELINE: lambda blocks, gamma: Residual(blocks, lambda f, x: checkpoint(f, x, use_reentrant=False)),
    "retrograde, reverse": momentum("reverse"),
    "retrograde, checkpoint": momentum("checkpoint"),
    "retrograde, store": momentum("store"),
    "momentumnet 0.10": reference,
}


def available() -> list[str]:
    installed = importlib.util.find_spec("momentumnet") is not None
    return [name for name in METHODS if installed or METHODS[name] is not reference]


def training_step(network: nn.Module, x: Tensor) -> None:
    network(x).square().mean().backward()


def timed_step(network: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        network.zero_grad()
        training_step(network, x)

    return step


def times(name: str, options: argparse.Namespace) -> list[list[str]]:
    """Rows of the table of times for one case."""
    case = CASES[name]
    torch.manual_seed(0)
    x, blocks = torch.randn(case.shape), [case.block() for _ in range(case.timed)]
    steps = {m: timed_step(METHODS[m](copy.deepcopy(blocks), options.gamma), x) for m in available()}
    taken = interleave(steps, options.repeats, options.warmup)
    rows = []
    for method, its in taken.items():
        lower, upper = its.quartiles
        span = f"{1e3 * lower:.0f}–{1e3 * upper:.0f}"
        rows.append(
            [method, f"{1e3 * its.median:.0f}", span, f"{1e3 * its.min:.0f}", f"{its.ratio(taken[BASELINE]):.2f}"]
        )
    return rows


@dataclass(frozen=True)
class Job:
    """A measurement of memory, for a process of its own. `weights`: "tied" or "separate"."""

    case: str
    method: str
    depth: int
    weights: str
    gamma: float


def memory(job: Job) -> dict[str, int]:
    """Peak memory of a training step beyond model, data and gradients: resident, and by PyTorch's allocator."""
    case = CASES[job.case]
    torch.manual_seed(0)
    x = torch.randn(case.shape)
    blocks = [case.block()] * job.depth if job.weights == "tied" else [case.block() for _ in range(job.depth)]
    network = METHODS[job.method](blocks, job.gamma)
    training_step(network, x[:2].clone())
    start = resident(reset=True)
    training_step(network, x)
    growth = resident(peak=True) - start
    return {"resident": growth, "allocated": peak_memory(lambda: training_step(network, x)).peak}


def resident(peak: bool = False, reset: bool = False) -> int:
    """Resident bytes of this process, now or at most.

    Linux's ru_maxrss is no use here: a child inherits its parent's. /proc has the child's own.
    """
    if not Path("/proc/self/status").exists():
        maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return maximum * (1 if sys.platform == "darwin" else 1024)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def in_fresh_process(job: Job) -> dict[str, int]:
    command = [sys.executable, __file__, "--job", json.dumps(vars(job))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{job} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peaks(name: str, options: argparse.Namespace) -> list[list[str]]:
    """Rows of the table of peak memory for one case."""
    depth = options.depth or CASES[name].deep
    found = {m: in_fresh_process(Job(name, m, depth, "separate", options.gamma)) for m in available()}
    rows = []
    for method, figures in found.items():
        row = [method]
        for kind in ("resident", "allocated"):
            row += [human(figures[kind]), f"{found[BASELINE][kind] / max(figures[kind], 1):.1f}"]
        rows.append(row)
    return rows


def tied(name: str, options: argparse.Namespace) -> list[list[str]]:
    """Rows of the table of peak memory over depth, one block repeated."""
    return [
        [method] + [
            human(in_fresh_process(Job(name, method, depth, "tied", options.gamma))[options.kind])
            for depth in options.tied_depths
        ]
        for method in available()
    ]  # fmt: skip


def tables(options: argparse.Namespace) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of every table asked for."""
    made = []
    for name in options.cases:
        case = CASES[name]
        shape = "×".join(map(str, case.shape))
        if "time" in options.parts:
            header = ["method", "median, ms", "quartiles, ms", "best, ms", "× checkpoint"]
            made.append((f"Step time: {name} {shape}, depth {case.timed}", header, times(name, options)))
        if "memory" in options.parts:
            header = ["method", "resident", "checkpoint ÷ this", "allocated", "checkpoint ÷ this"]
            made.append(
                (f"Peak memory: {name} {shape}, depth {options.depth or case.deep}", header, peaks(name, options))
            )
        if "tied" in options.parts:
            header = ["method", *(f"depth {depth}" for depth in options.tied_depths)]
            made.append(
                (f"Peak memory over depth, tied weights ({options.kind}): {name} {shape}", header, tied(name, options))
            )
    return made


def cpu() -> str:
    found = None
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.processor() or platform.machine()


def facts(options: argparse.Namespace) -> list[str]:
    """Hardware, versions and command, one line each."""
    versions = [f"torch {torch.__version__}", f"retrograde {rg.__version__}", f"Python {platform.python_version()}"]
    if "momentumnet 0.10" in available():
        versions.append(f"momentumnet {importlib.metadata.version('momentumnet')}")
    return [
        f"CPU: {cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; {platform.system()} {platform.machine()}",
        "versions: " + ", ".join(versions),
        f"γ = {options.gamma}, {options.repeats} repeats after {options.warmup} to warm up, methods in turns; float32",
        "memory: one training step in a fresh process, beyond model, data and gradients",
        "command: `python benchmarks/cpu_step.py " + " ".join(sys.argv[1:]) + "`",
    ]


def write(made: list[tuple[str, list[str], list[list[str]]]], options: argparse.Namespace) -> Path:
    """The tables as Markdown, named by CPU and date."""
    today = datetime.date.today().isoformat()
    lines = [f"# A training step on a CPU, {today}", "", *(f"- {fact}" for fact in facts(options))]
    for title, header, rows in made:
        lines += ["", f"## {title}", ""]
        lines += ["| " + " | ".join(row) + " |" for row in [header, ["---"] + ["---:"] * (len(header) - 1), *rows]]
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(\w+\)|processor|cpu", " ", cpu().lower())).strip("-")
    path = RESULTS / f"cpu_step_{slug}_{today}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=["time", "memory", "tied"], default=["time", "memory", "tied"])
    parser.add_argument("--repeats", type=int, default=15, help="rounds of the timing that count")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them")
    parser.add_argument("--gamma", type=float, default=0.9)
    parser.add_argument("--depth", type=int, help="depth of the memory figures; by default the deep end of each case")
    parser.add_argument("--tied-depths", nargs="+", type=int, default=TIED_DEPTHS)
    parser.add_argument(
        "--kind", choices=["resident", "allocated"], default="allocated", help="memory shown over depth"
    )
    parser.add_argument("--write", action="store_true", help=f"write a file into {RESULTS.parent.name}/{RESULTS.name}")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.job:
        print(json.dumps(memory(Job(**json.loads(options.job)))))
        return
    console = Console()
    console.print("\n".join(facts(options)), highlight=False)
    if "momentumnet 0.10" not in available():
        console.print("The reference package is left out: pip install --no-deps momentumnet==0.10 to include it.")
    with console.status("measuring"):
        made = tables(options)
    for title, header, rows in made:
        table = Table(title=title, title_justify="left")
        for k, heading in enumerate(header):
            table.add_column(heading, justify="right" if k else "left", no_wrap=k == 0)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if options.write:
        console.print(f"written: {write(made, options)}", soft_wrap=True)


if __name__ == "__main__":
    main()
