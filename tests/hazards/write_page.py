"""Runs the hazard matrix, what could make a gradient wrong against every contender, and writes docs/hazards.md.

Each hazard (see tests/hazards) is run with stored activations and with each contender's way of saving memory, on the same
seeds, and the gradients are compared. The page is written from what was found. momentumnet, revlib and memcnn take part
where a folder that holds them is given:

    pip install --no-deps --target peers momentumnet==0.10 revlib==1.7.2 memcnn==1.5.2
    python tests/hazards/write_page.py --peers peers --write
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from hazard_contenders import PEERS, Retrograde, contenders
from hazard_list import ALL, THEMES
from hazard_registry import Cell, judge, judge_ours
from rich.console import Console
from rich.progress import track
from rich.table import Table

PAGE = Path(__file__).parents[2] / "docs" / "hazards.md"

COLUMNS = ["Retrograde", "torch checkpoint", *PEERS]
INTRODUCTION = """\
# Hazards

What could make a gradient wrong without anybody noticing, and what happens. Every row is a small function in
`tests/hazards`; `python tests/hazards/write_page.py --peers FOLDER --write` runs them all and writes this page, and the tests run our
column, in every scheme, in every way to remember, and in a converted model. {environment}

A row is run twice on the same seeds: with stored activations, which is the truth, and with the contender's way of saving
memory. Compared are output, gradients, buffers (running statistics) and the random number that comes next.

- **right**: the same bits. **right to 3e-06**: equal up to the rounding of an inversion in floats (relative error of the worst tensor).
- **wrong** (0.4): another result and no error, with the relative error of the worst gradient, or of what else is named.
- **raises**: an error, and how it begins. Where plain autograd itself refuses (backward twice, say) that is the right answer.

Ours must also agree with the same recurrence in plain floats; "5e-03 from floats" says how well, where that is not to rounding.

| contender | its network, and the truth it is compared with |
|---|---|
| Retrograde | `MomentumNet(memory="reverse")`, default `verify="auto"`; `memory="store"` |
| torch checkpoint | x ← x + checkpoint(f, x, use_reentrant=False); x ← x + f(x) |
| momentumnet 0.10 | the reference, `use_backprop=False`; `use_backprop=True`, and the recurrence in plain torch |
| revlib 1.7.2 | `ReversibleSequential`, on x beside itself; the same coupling in plain torch |
| memcnn 1.5.2 | `InvertibleModuleWrapper(AdditiveCoupling, preserve_rng_state=True)`; `disable=True` |
"""
RANGE_NOTE = """\
One fixed point holds all x of a pass. Where values grow, the range widens within the pass, and no finite value raises on a
CPU. What a range cannot hold:

- |x| below 5e-26 everywhere (in float64 below 9e-19) raises, in a first pass and later: 107 fraction bits are the most there
  are. In float64 there could be more; but the largest values of a pass are written down in units of the range as float32, and
  so is 2^bits.
- An x that is small beside others of its pass has fewer digits: beside one 2^27 times as large (float32) none, and a block
  that is given it is given 0. The same holds for one batch after another that was as much larger: the range follows with the
  next pass. After a batch a million times as large, an ordinary one was off by 1.7e-2, once. Where it is the input of the
  network that is held to fewer than 11 binary digits (3 with 16-bit state, 24 in float64), a warning says so; that of a
  single element does not show.
"""
VERIFY_NOTE = """\
What `verify="off"` lets through is a block that does not repeat itself: it reads something that is not restored for its replay
(only its input, its parameters and buffers, torch's generators, its mode, autocast and its lists are), and that something has
changed. Or its parameters were changed through `.data`. In a converted model also an x that was changed between two blocks
through `.data` or NumPy. `torch.utils.checkpoint` and the others are wrong there as well, or right by luck where the quantity
enters no saved tensor.

The default, `verify="auto"`, finds that, in reverse and in checkpoint mode. Gradients are made of what a block saves for
autograd and of nothing else. So a sample of every tensor saved is hashed at the first run and at the replay: all of it up to
256 elements, beyond that as many, evenly spread. This also finds what enters a gradient and not the output: something
random behind a gate of zeros (ReZero, LayerScale, LoRA at the start), the mask of a straight-through estimator, a factor that
a Function of one's own saves. In reverse mode the whole state is hashed as well, at the first block that is replayed, on the
way forward and when backward is back there: a wrong output anywhere above moves it.

On a CPU the error comes at the end of backward. An accelerator is not waited for: there the error comes at the start of a
later pass, or from `rg.settle(net)`. `verify="strict"` hashes everything that is saved, and the output; it names the block
and raises before the gradients of that block are made. Neither takes back gradients that have been added to `.grad` already.

What the default may miss: a change in few elements of a large tensor, outside of the sample, which in reverse mode leaves the
output as it was; in checkpoint mode any such change. What neither compares: parameters and buffers (writes to them are found
by their versions); copies of running statistics; rows of bytes and single integers, in which libraries keep workspaces and
places of generators; the noise of a random relu in eval mode, and the table of a CTC loss. What a Function keeps elsewhere,
as an attribute of ctx, is the first run's and needs no replay.

Known to be missed: a block that reads the running statistics of a BatchNorm of its own in training (`bn(x) * bn.running_var`)
raises in reverse mode and is wrong in checkpoint mode; a buffer that is written to in a way PyTorch does not count (`.data`,
`F.batch_norm` on it) for the first time after the first step, and a buffer that is deleted in forward, are not put back.
"""
TRIED = """\
## What else was tried

By hand, on two CPU cores, against stored activations, to the bit unless another bound is given. "Refused" is an error by default.

| what | how often | wrong | command |
|---|---|---|---|
| random networks, inputs, γ (random signs in one of five) and programs, every mode | 24,689; two false alarms, corrected | 0 | `python tests/fuzz/run.py` |
| steps stopped by real signals, half of them from another process, half of them from a timer | 3,000 for each of reverse, checkpoint, store | 0 | `python tests/hazards/interrupted.py` |
| steps stopped at every place at which Python looks for signals | 9,353 places | 0 | `pytest tests/hazards/test_interrupted.py` |
| evaluations of one model by 4 threads at once, 20 models, to 1e-4 | 80,000 | 0, none raised | `python tests/hazards/threads.py` |
| two models trained side by side in two threads, to 1e-4 | 24 | 0 | the same |
| 21 networks (plain, random signs, converted, nested, RevNet, i-RevNet, Hamiltonian, 16-bit state) × 72 things to do with them | 2,993 | 0; 119 refused, all of them blocks that do not repeat themselves | |
| x used between blocks (skips, side losses, `autograd.grad`), no_grad and autocast for some blocks, exceptions in hooks, optimizer in backward, compiled blocks | 195 | 0 | |
| DDP (static graph, unused parameters, no_sync) and FSDP2 (with and without resharding), two processes, γ = 0.9 and random signs, reverse, checkpoint, budget | 36 | 0 | |
| NumPy noise behind LayerScale 0 … 1e-3 or beside \\|x\\| up to 1e6, 16-bit state, random signs | 1,890 | 0; 1,374 refused, the others do not enter a gradient | |
| x changed in place, through `.data`, NumPy or DLPack between converted blocks | 144 | 0 | |
| \\|x\\| from 5e-324 to 1e307, first pass and later | 250 | 0; refused below the range, or warned of with the number of digits | |

What a replay repeats and nobody sees: writes to things that belong to no module and enter no gradient, such as a global counter, or a
log of numbers. A budget is planned on a copy of the model, so such things see one more pass before the first step; the model itself
sees none. Two threads that draw from PyTorch's one generator at once (dropout, random signs) disturb each other's replays: refused.
A pass that `torch.utils.checkpoint` runs again, with `memory="store"` inside of it, may begin in another range than its first run, because
the range follows what passes have met: its gradients are then those of values rounded otherwise (1e-3 in 16-bit state, once).
With `parametrize.cached()` around both passes, parametrisations that save tensors (weight norm) are refused, except in `memory="store"`.
"""  # noqa: E501


def environment() -> str:
    return f"Made with PyTorch {torch.__version__}, Python {platform.python_version()}, on a CPU."


def run(peers: str | None) -> dict[str, dict[str, Cell]]:
    """Every cell, by hazard and column."""
    others = contenders(peers)[1:]
    cells: dict[str, dict[str, Cell]] = {}
    for h in track(ALL, description="hazards"):
        row = cells[h.name] = {"Retrograde": judge_ours(h, Retrograde)}
        row |= {c.name: judge(h, c) for c in others} | {"off": judge(h, Retrograde("off"))}
    return cells


def summary(cells: dict[str, dict[str, Cell]]) -> list[list[str]]:
    """Rows of counts: contender, right, wrong, raises, cannot."""
    rows = []
    for title, column in [
        ("Retrograde", "Retrograde"),
        ('Retrograde, verify="off"', "off"),
        *((c, c) for c in COLUMNS[1:]),
    ]:
        kinds = Counter(row[column].kind for row in cells.values() if column in row)
        counts = [kinds["right"] + kinds["near"], kinds["wrong"], kinds["raises"], kinds["cannot"]]
        rows.append([title, *(map(str, counts) if kinds else ["not run"] * 4)])
    return rows


def page(cells: dict[str, dict[str, Cell]]) -> str:
    """docs/hazards.md."""
    lines = [INTRODUCTION.format(environment=environment()), f"## {len(ALL)} hazards, counted", ""]
    lines += ["| | right | silently wrong | raises | cannot express |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in summary(cells)]
    lines += ["", VERIFY_NOTE]
    for theme in THEMES:
        lines += [
            f"## {theme.capitalize()}",
            "",
            *([RANGE_NOTE] if theme == "precision and range" else []),
            f"| hazard | {' | '.join(COLUMNS)} |",
            "|---" * (len(COLUMNS) + 1) + "|",
        ]
        for h in ALL:
            if h.theme == theme:
                row = [str(cells[h.name].get(column, "not run")).replace("|", "\\|") for column in COLUMNS]
                lines.append(f"| {h.text} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join([*lines, TRIED]).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder that holds momentumnet, revlib and memcnn")
    parser.add_argument("--write", action="store_true", help="write docs/hazards.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    cells = run(options.peers)
    if options.write:
        PAGE.write_text(page(cells))
    table = Table("", "right", "silently wrong", "raises", "cannot express", title=f"{len(ALL)} hazards")
    for row in summary(cells):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
