"""A training step as one CUDA graph, for networks and batches too small to keep a GPU busy.

python examples/cuda_graph.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.nets.resnet import thin_resnet

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
depth, batch = (56, 64) if device.type == "cuda" else (20, 8)
net = thin_resnet(depth, gamma=0.9, memory="reverse").to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1, device=device), momentum=0.9, foreach=True)
images, labels = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)


def step() -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def timed(step: Callable[[], object], count: int = 20) -> float:
    start = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def captured() -> torch.cuda.CUDAGraph:
    """The step, after a few without a graph, on a side stream: the fixed-point range is found, and algorithms are chosen."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


if device.type == "cpu":
    print(f"There is no GPU here. A step takes {timed(step, 3):.0f} ms, and no graph is made of it.")
else:
    graph = captured()

    def replay() -> None:
        images.copy_(torch.randn_like(images))  # the graph reads what is there
        labels.copy_(torch.randint_like(labels, 10))
        graph.replay()

    replayed = timed(replay)
    print(f"a step: {timed(step):.1f} ms one kernel after another, {replayed:.1f} ms as a graph")
rg.settle(net)  # raises what the replays have met: no Python of the network ran in them
