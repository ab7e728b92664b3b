"""DistributedDataParallel around a model with a momentum stack.

    torchrun --nproc_per_node 2 examples/ddp.py

Trains one model in three memory modes on as many processes as torchrun starts (gloo on CPU, nccl on GPUs) and shows that the mode
changes no bit of the weights, and how many gradient all-reduces were under way when backward reached the lowest block.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg

WIDTH, DEPTH, BATCH, STEPS = 64, 24, 32, 15


def branch() -> nn.Module:
    """f(x) of one residual block."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Model(nn.Module):
    def __init__(self, memory: str) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every process and in every mode
        self.stem, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
        self.stack = rg.MomentumNet([branch() for _ in range(DEPTH)], gamma=0.9, memory=memory, verify="strict")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(self.stem(x)))


def train(memory: str, device: torch.device) -> tuple[nn.Module, float, float, str]:
    plain = Model(memory).to(device)
    ddp = DistributedDataParallel(plain, bucket_cap_mb=0.25)
    sent: list[int] = []  # buckets whose all-reduce has been started in this backward pass
    at_lowest: list[int] = []

    def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, reduce)
    plain.get_parameter("stack.blocks.0.1.weight").register_hook(lambda gradient: at_lowest.append(len(sent)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    numbers = torch.Generator().manual_seed(1 + dist.get_rank())  # other data on each rank
    began = time.perf_counter()
    for _ in range(STEPS):
        x = torch.randn(BATCH, 16, generator=numbers).to(device)
        sent.clear()
        optimizer.zero_grad()
        loss = (ddp(x) - x.sin().sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / STEPS
    dist.all_reduce(total := loss.detach() / dist.get_world_size())
    return plain, float(total), seconds, f"{at_lowest[-1]} of {len(sent)}"


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("this is started by torchrun: torchrun --nproc_per_node 2 examples/ddp.py")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {DEPTH} blocks, {STEPS} steps")
        print(f"{'memory':<12}{'loss':>10}{'ms/step':>10}{'sent before block 0 ends':>28}{'bits of store':>16}")
    stored: list[Tensor] = []
    for memory in ("store", "checkpoint", "reverse"):
        trained, loss, seconds, sent = train(memory, device)
        weights = [p.detach() for p in trained.parameters()]
        stored = stored or weights
        same = "yes" if all(map(torch.equal, weights, stored)) else "NO"
        if dist.get_rank() == 0:
            print(f"{memory:<12}{loss:>10.4f}{1e3 * seconds:>10.1f}{sent:>28}{same:>16}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
