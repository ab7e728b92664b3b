"""One process or several: DDP and FSDP2 as PyTorch has them, set up from what torchrun puts into the environment.

`gather` and `scatter` turn a network and its optimizer into whole tensors on the CPU and back, by PyTorch's own state-dict
functions: a checkpoint does not depend on how many processes wrote it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..errors import ExperimentError

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class World:
    """The processes that train one network. `rank` of `size`; `device` of this one."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size

    def wrap(self, net: nn.Module) -> nn.Module:
        """The network to call."""
        return net

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a part of a batch: gradients are exchanged with the last part only."""
        return nullcontext()

    def settle(self, wrapped: nn.Module) -> None:
        """After forward passes without a backward: parameters as they are between steps."""

    def agree(self, net: nn.Module) -> None:
        """Give every process the buffers (BatchNorm's statistics) of the first."""
        if self.size > 1:
            for buffer in net.buffers():
                dist.broadcast(buffer, 0)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def gather(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole tensors on the CPU, on the first process (empty elsewhere)."""
        self.agree(net)
        found, state = get_state_dict(net, optimizer, options=WHOLE)
        return found, state

    def scatter(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, found: dict[str, Any], state: dict[str, Any]
    ) -> None:
        """The inverse of `gather`; every process has read the same checkpoint."""
        set_state_dict(net, optimizer, model_state_dict=found, optim_state_dict=state, options=WHOLE)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sharded tensors as whole ones on the CPU."""
        full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}
        return {name: t.detach().cpu() for name, t in full.items()}

    def spread(self, into: list[Tensor], values: list[Tensor]) -> None:
        """The inverse of `whole`, in place."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        for held, value in zip(into, values, strict=True):
            value = value.to(self.device)
            held.copy_(
                distribute_tensor(value, held.device_mesh, held.placements) if isinstance(held, DTensor) else value
            )

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Alone(World):
    """One process."""


class Replicas(World):
    """DDP: every process has the network; gradients are averaged."""

    def wrap(self, net: nn.Module) -> nn.Module:
        ids = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(net, device_ids=ids)

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else wrapped.no_sync()  # type: ignore[operator]


class Shards(World):
    """FSDP2: every process has a part of each block's parameters."""

    def wrap(self, net: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        for name, stage in net.named_children():
            if name.startswith("layer"):
                for block in _blocks(stage):
                    fully_shard(block)
        fully_shard(net)
        return net

    def sync(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def settle(self, wrapped: nn.Module) -> None:
        wrapped.reshard()  # type: ignore[operator] # the root's stay whole after its forward


def _blocks(stage: nn.Module) -> list[nn.Module]:
    """The blocks of a stage; a RevNet in it counts by its own."""
    return [block for child in stage.children() for block in getattr(child, "blocks", [child])]


def join(kind: str, device: str) -> World:
    """The world that torchrun has set up, or this process alone.

    Args:
        kind: "ddp" or "fsdp".
        device: "cpu", "cuda", "cuda:N", or "auto".
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen, size = torch.device(device), int(os.environ.get("WORLD_SIZE", "1"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ExperimentError(f"{device!r} is not on this machine: it has no CUDA device. Pass --device cpu.")
    if "RANK" not in os.environ or (size == 1 and kind == "ddp"):
        if kind == "fsdp":
            raise ExperimentError("--parallel fsdp needs the processes of torchrun: torchrun --nproc-per-node 2 …")
        return Alone(chosen)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return (Replicas if kind == "ddp" else Shards)(chosen, dist.get_rank(), size)
