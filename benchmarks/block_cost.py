"""What a block costs besides its arithmetic: host time of forward and backward, µs a block, of many blocks of tiny tensors.

    python benchmarks/block_cost.py                        # medians, in turns, on one thread
    python benchmarks/block_cost.py --blocks 50 --repeats 9

The rows "looked at" have a hook on every x between blocks, by which all of its gradient goes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg

Step = Callable[[], None]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Looped(nn.Module):
    """The blocks one after the other, as a model runs them; `looked`: with a hook on what each gives."""

    def __init__(self, blocks: Sequence[nn.Module], looked: bool = False) -> None:
        super().__init__()
        self.layers, self.looked = nn.ModuleList(blocks), looked

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.looked:
                x.register_hook(lambda g: None)
        return x


def again(net: Looped, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def step(net: Callable[[Tensor], Tensor], x: Tensor) -> None:
    net(x).sum().backward()


def steps(blocks: int, width: int) -> dict[str, Step]:
    """A training step of the same blocks, remembered in different ways."""
    made, x = [Residual(width) for _ in range(blocks)], torch.randn(2, width, requires_grad=True)
    nets: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": Looped(made),
        "torch checkpoint": partial(again, Looped(made)),
    }
    for memory in ("store", "checkpoint", "reverse"):
        nets[memory] = rg.MomentumNet(made, form="block", memory=memory)
    for name, looked in (("converted, reverse", False), ("converted, reverse, looked at", True)):
        nets[name] = rg.convert(Looped(copy.deepcopy(made), looked), stages=["layers"], memory="reverse")
    return {name: partial(step, net, x) for name, net in nets.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    todo = steps(given.blocks, given.width)
    taken: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(given.repeats + 2):  # two for whatever happens once
        for name, run in todo.items():
            start = time.perf_counter()
            run()
            if turn > 1:
                taken[name].append(time.perf_counter() - start)
    print(f"{'µs a block':32}{'median':>8}{'least':>8}")
    for name, row in taken.items():
        print(f"{name:32}", *(f"{1e6 * t / given.blocks:7.1f}" for t in (statistics.median(row), min(row))))


if __name__ == "__main__":
    main()
