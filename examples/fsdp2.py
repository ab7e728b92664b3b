"""FSDP2 (`fully_shard`) around a model with a momentum stack.

    torchrun --nproc_per_node 2 examples/fsdp2.py

Each process holds its part of every parameter, and blocks are gathered one at a time: in forward, and again when backward runs
them in reverse. Neither the parameters nor the activations of the whole depth are ever in one place. The trained weights come
out as the state dict of the plain model.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import retrograde as rg

WIDTH, DEPTH, BATCH, STEPS = 64, 8, 32, 6


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


def sharded(memory: str, precision: torch.dtype, device: torch.device) -> Model:
    net = Model(memory).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in net.stack.blocks:  # each block by itself: that is what keeps one gathered at a time
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)  # and what is left: stem and head
    return net


def train(net: Model, device: torch.device) -> tuple[float, float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)  # after sharding: it holds this rank's parts
    numbers = torch.Generator().manual_seed(1 + dist.get_rank())
    began = time.perf_counter()
    for _ in range(STEPS):
        x = torch.randn(BATCH, 16, generator=numbers).to(device)
        optimizer.zero_grad()
        loss = (net(x).float() - x.sin().sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / STEPS
    dist.all_reduce(total := loss.detach() / dist.get_world_size())
    return float(total), seconds


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("this is started by torchrun: torchrun --nproc_per_node 2 examples/fsdp2.py")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    first = dist.get_rank() == 0
    if first:
        whole = sum(p.numel() for p in Model("store").parameters())
        print(f"{dist.get_world_size()} processes, {DEPTH} blocks, {STEPS} steps, {whole:,} parameters")
        print(f"{'precision':<12}{'memory':<12}{'loss':>10}{'ms/step':>10}{'parameters here':>18}{'bits of store':>16}")
    for precision in (torch.float32, torch.bfloat16):
        stored: list[Tensor] = []
        for memory in ("store", "checkpoint", "reverse"):
            net = sharded(memory, precision, device)
            loss, seconds = train(net, device)
            parts = [p.to_local().detach() for p in net.parameters() if isinstance(p, DTensor)]
            stored = stored or parts
            same = "yes" if all(map(torch.equal, parts, stored)) else "NO"
            if first:
                here = f"{sum(p.numel() for p in parts):,}"
                name = str(precision).removeprefix("torch.")
                print(f"{name:<12}{memory:<12}{loss:>10.4f}{1e3 * seconds:>10.1f}{here:>18}{same:>16}")
        weights = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if first:
        Model("reverse").load_state_dict(weights)
        print(f"whole state dict: {len(weights)} tensors, loaded into the plain model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
