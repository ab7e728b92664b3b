"""Converted models used from several threads at once, counted.

python tests/hazards/threads.py                      # 20 models, 4 threads × 1,000 evaluations each
python tests/hazards/threads.py --evaluations 50 --models 4
"""

from __future__ import annotations

import argparse
import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

THREADS = 4
GAMMAS = (0.9, 1 / 8, rg.RandomSign(1 / 8), 0.5)
MODES = ("reverse", "auto", "store", "checkpoint")
GUARDS: tuple[Callable[[], Any], ...] = (torch.no_grad, torch.inference_mode, torch.enable_grad)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Branches(nn.Module):
    """Blocks that give f, which the loop adds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def model(k: int) -> tuple[nn.Module, list[Tensor]]:
    """The k-th model, and an input for each thread."""
    torch.manual_seed(k)
    images = k % 4 == 1
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=True)
    parts = [
        lambda: nn.Sequential(*[Dense() for _ in range(6)]),
        lambda: nn.Sequential(*[Image() for _ in range(5)]),
        lambda: nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        Branches,
    ]  # fmt: skip
    made = parts[k % 4]()
    stages = [["*"], ["*"], ["layers"], ["layers"]][k % 4]
    form = "branch" if k % 4 == 3 else "block"
    rg.convert(made, stages=stages, form=form, gamma=GAMMAS[k // 4 % 4], memory=MODES[k % 3])
    inputs = [torch.randn(2, 3, 6, 6) if images else torch.randn(2, 5, 8) for _ in range(THREADS)]
    return made, inputs


def at_once(jobs: list[Callable[[], None]]) -> list[str]:
    """Run the jobs in a thread each; what they raised."""
    raised: list[str] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}"[:200])

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def same(a: Tensor, b: Tensor) -> bool:
    """Up to the last bits of the fixed point, whose range follows what passes before have met."""
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def evaluations(k: int, times: int) -> Counter[str]:
    """Four threads evaluate one model; every other model has never been run before."""
    net, inputs = model(k)
    net.eval()
    guard, found = GUARDS[k % 3], Counter[str]()

    def evaluated(net: nn.Module, x: Tensor) -> Tensor:
        with guard():
            return net(x).detach()

    apart = copy.deepcopy(net)
    expected = [evaluated(apart, x) for x in inputs]
    if k % 2:
        evaluated(net, inputs[0])

    def work(t: int) -> None:
        for _ in range(times):
            try:
                y = evaluated(net, inputs[t])
            except Exception:
                found["raised"] += 1
                continue
            found["evaluations"] += 1
            found["wrong"] += not same(y, expected[t])

    at_once([lambda t=t: work(t) for t in range(THREADS)])  # type: ignore[misc]
    found["broken"] += not all(same(evaluated(net, x), y) for x, y in zip(inputs, expected, strict=True))
    return found


def trained(net: nn.Module, x: Tensor, steps: int) -> list[Tensor]:
    for _ in range(steps):
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return [p.detach().clone() for p in net.parameters()]


def without_dropout(net: nn.Module) -> nn.Module:
    """Threads share torch's generator, so what dropout draws in one depends on the others."""
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return net


def trainings(k: int, steps: int) -> Counter[str]:
    """Two models trained side by side; then one model, by two threads at once."""
    found = Counter[str]()
    nets = [(without_dropout(net), inputs[0]) for net, inputs in (model(k), model(k + 4))]
    signed = k // 4 % 4 == 2 or (k + 4) // 4 % 4 == 2
    expected = [trained(copy.deepcopy(net), x, steps) for net, x in nets]
    results: list[list[Tensor]] = [[], []]

    def train(t: int) -> None:
        results[t] = trained(*nets[t], steps)

    found["refused"] += len(at_once([lambda t=t: train(t) for t in range(2)]))  # type: ignore[misc]
    for result, right in zip(results, expected, strict=True):
        if result and not signed:  # signs are drawn like dropout
            found["trainings"] += 1
            found["wrong"] += not all(map(same, result, right))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--evaluations", type=int, default=1000, help="of each thread")
    parser.add_argument("--steps", type=int, default=50, help="of each training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    total, side = Counter[str](), Counter[str]()
    for k in range(options.models):
        total += evaluations(k, options.evaluations)
        side += trainings(k, options.steps)
    print("evaluated:", {name: total[name] for name in ("evaluations", "wrong", "raised", "broken")})
    print("trained side by side:", {name: side[name] for name in ("trainings", "wrong", "refused")})
    return int(total["wrong"] + total["raised"] + total["broken"] + side["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
