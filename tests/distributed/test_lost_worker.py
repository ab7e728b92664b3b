"""A process killed, stopped or failing in the middle of a step: the other gets an error, it does not hang, and can go on."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pair import Case, Outcomes, Survivor, launch
from subjects import SUBJECTS, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import retrograde as rg
from problems import Mlp, assert_same_bits

PATIENCE = 5.0


class Mishap(nn.Module):
    """A block to which something happens when it is run for the given time."""

    def __init__(self, block: nn.Module, what: Callable[[], None], run: int) -> None:
        super().__init__()
        self.block, self.what, self.run, self.runs = block, what, run, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.run:
            self.what()
        return self.block(x)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_other() -> None:
    """Stand still until rank 0 has given up on this one."""
    dist.distributed_c10d._get_default_store().wait(["given up"])


def fail() -> None:
    raise FloatingPointError("this block fails here")


def distributed(
    wrapper: str, memory: str, rank: int, what: Callable[[], None], run: int
) -> tuple[nn.Module, nn.Module]:
    """The model and its wrapped self, with a mishap in block 3 of rank 1."""
    model = SUBJECTS["mlp"].build(memory, "strict")
    blocks = model.get_submodule("body").blocks
    assert isinstance(blocks, nn.ModuleList)
    blocks[3] = Mishap(blocks[3], what, run if rank == 1 else -1)
    if wrapper == "ddp":
        return model, DDP(model, bucket_cap_mb=0.001)
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


# block 3 runs in the forward and in the backward pass of each step
IN_FORWARD, IN_BACKWARD = 3, 4


def case_lost(wrapper: str, memory: str, what: Callable[[], None], run: int, rank: int) -> Survivor:
    model, wrapped = distributed(wrapper, memory, rank, what, run)
    began = time.monotonic()
    try:
        train(wrapped, SUBJECTS["mlp"], rank)
        error = "no error"
    except (RuntimeError, FloatingPointError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    del wrapped
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("given up", "")
    return Survivor(error, time.monotonic() - began, _alone(model) if wrapper == "ddp" else None)


def _alone(model: nn.Module) -> list[Tensor]:
    """Gradients of a step on this process only, by the model as the failure left it: those of stored activations, to the bit."""
    gc.collect()  # DDP's hooks leave the parameters with it
    stored = copy.deepcopy(model)
    stored.get_submodule("body").memory = "store"  # type: ignore[assignment]
    x, _ = SUBJECTS["mlp"].batch(5)
    found = []
    for each in (model, stored):
        each.zero_grad()
        each(x).square().mean().backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) == 22
    assert all(map(torch.equal, *found)), "the step after the failure has other gradients than stored activations give"
    return found[0]


def case_trains(rank: int) -> dict[str, Tensor]:
    """The next run: as if nothing had happened."""
    found = {m: train(DDP(SUBJECTS["mlp"].build(m, "strict")), SUBJECTS["mlp"], rank) for m in ("store", "reverse")}
    assert_same_bits(found["store"], found["reverse"])
    return found["reverse"]


def case_one_large_batch(fixed_point: Any, rank: int) -> float:
    """Rank 0 gets inputs 1,000 times as large in the second step. Both must issue the same collectives all the same."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = rg.MomentumNet([Mlp(6, 8) for _ in range(4)], memory="reverse", fixed_point=fixed_point, verify="strict")
    for block in net.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    x, _ = SUBJECTS["mlp"].batch(0)
    for scale in (1.0, 1000.0 if rank == 0 else 1.0, 1.0):
        net(x * scale).mean().backward()
    gradients = [p.grad for p in net.parameters()]
    return sum(float(g.full_tensor().abs().sum()) for g in gradients if isinstance(g, DTensor))


LOST: dict[str, Case] = {
    "ddp, in backward": partial(case_lost, "ddp", "reverse", die, IN_BACKWARD),
    "ddp checkpoint, in backward": partial(case_lost, "ddp", "checkpoint", die, IN_BACKWARD),
    "fsdp2, in forward": partial(case_lost, "fsdp2", "reverse", die, IN_FORWARD),
}
FAILED: dict[str, Case] = {
    "fails in forward": partial(case_lost, "ddp", "reverse", fail, IN_FORWARD),
    "fails in backward": partial(case_lost, "ddp", "reverse", fail, IN_BACKWARD),
    "fails in backward, checkpoint": partial(case_lost, "ddp", "checkpoint", fail, IN_BACKWARD),
}
LARGE: dict[str, Case] = {
    "a large batch": partial(case_one_large_batch, "auto"),
    "a large batch, the range given": partial(case_one_large_batch, rg.FixedPoint(12, torch.int32)),
}


@pytest.fixture(scope="module")
def failures() -> Outcomes:
    """Failures that leave both processes alive, each followed by training in the same processes."""
    cases: dict[str, Case] = {}
    for name, case in FAILED.items():
        cases |= {name: case, f"after {name}": case_trains}
    cases["stands still"] = partial(case_lost, "ddp", "reverse", wait_for_the_other, IN_BACKWARD)
    return launch(cases | {"after stands still": case_trains} | LARGE, patience=PATIENCE)


@pytest.mark.parametrize("name", LOST)
def test_killed_worker_is_an_error_for_the_other(name: str) -> None:
    outcomes = launch({name: LOST[name]}, patience=PATIENCE)
    assert outcomes.exits == (0, -signal.SIGKILL)
    survivor, problem = outcomes.found[name, 0]
    assert problem is None, problem
    assert survivor.error.startswith("RuntimeError"), survivor.error
    assert "connection" in survivor.error.lower(), survivor.error
    assert survivor.seconds < PATIENCE, "told by its timeout, not by the connection that closed"


@pytest.mark.parametrize("name", FAILED)
def test_failing_worker_is_an_error_for_the_other_and_both_go_on(failures: Outcomes, name: str) -> None:
    zero, one = failures.of(name)
    assert zero.error.startswith("RuntimeError"), zero.error
    assert one.error == "FloatingPointError: this block fails here"
    assert len(zero.value) == len(one.value) == 22
    failures.of(f"after {name}")


def test_worker_that_stands_still_is_given_up(failures: Outcomes) -> None:
    zero, _ = failures.of("stands still")
    assert "timeout" in zero.error.lower() or "timed out" in zero.error.lower(), zero.error
    assert PATIENCE - 1 < zero.seconds < 4 * PATIENCE
    failures.of("after stands still")


@pytest.mark.parametrize("name", LARGE)
def test_one_rank_with_a_large_batch(failures: Outcomes, name: str) -> None:
    zero, one = failures.of(name)
    assert zero == one > 0
