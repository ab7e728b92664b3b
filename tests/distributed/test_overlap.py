"""Gradients are reduced while backward still runs.

The blocks are ordinary parts of the graph, so a block's gradients are there as soon as its turn is over, and DDP sends them while
the blocks below are being run again. Shown by the order of events (never by time), in a log that hooks write. Before block 0 is
run again the test waits for every reduction started so far: they can finish, so they did not need the rest of the backward pass.
The control is one bucket for everything, which can only be sent when the last gradient is there.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from pair import Outcomes, launch
from subjects import SUBJECTS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

DEPTH = 6
SMALL, LARGE = 0.001, 25.0  # MB; a block has 3.2 kB of parameters
Event = tuple[str, int]
Reduction = torch.futures.Future[torch.Tensor]


class Traced(nn.Module):
    """A block whose runs show in a trace and in a log. Block 0 first waits for the reductions under way.

    It has the lists by functions: lists that a block has as attributes are as they were in a replay.
    """

    def __init__(self, block: nn.Module, k: int, log: list[Event], under_way: list[Reduction]) -> None:
        super().__init__()
        self.block, self.k = block, k
        self.note = log.append
        self.wait = lambda: len(torch.futures.wait_all(under_way))
        self.ended = 0
        block.get_parameter("inner.weight").register_hook(lambda gradient: log.append(("gradient", k)))

    def forward(self, x: Tensor) -> Tensor:
        self.note(("run", self.k))
        if self.k == 0:
            self.ended = self.wait()
        return self.block(x)


def case_order(memory: str, bucket_mb: float, rank: int) -> tuple[list[Event], int]:
    """What the second step's backward pass did, in order, and how many reductions had ended before block 0 was run again.

    ("reduce", i): the all-reduce of bucket i was started; ("run", k): block k was run again; ("gradient", k): the gradient of its
    first weight, the last of the block's to come, was there.
    """
    model = SUBJECTS["mlp"].build(memory, "strict")
    log: list[Event] = []
    under_way: list[Reduction] = []
    blocks = [Traced(block, k, log, under_way) for k, block in enumerate(SUBJECTS["mlp"].blocks(model))]
    model.get_submodule("body").blocks = nn.ModuleList(blocks)
    ddp = DDP(model, bucket_cap_mb=bucket_mb)

    def reduce(_: object, bucket: dist.GradBucket) -> Reduction:
        log.append(("reduce", bucket.index()))
        group = dist.group.WORLD
        assert group is not None
        under_way.append(allreduce_hook(group, bucket))
        return under_way[-1]

    ddp.register_comm_hook(None, reduce)
    x, _ = SUBJECTS["mlp"].batch(rank)
    ddp(x).square().mean().backward()  # DDP arranges its buckets by the order of this first backward pass
    loss = ddp(x).square().mean()
    log.clear()
    under_way.clear()
    loss.backward()
    return log, blocks[0].ended


CASES = {f"{m}, {mb} MB": partial(case_order, m, mb) for m in ("reverse", "checkpoint") for mb in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_each_block_is_being_reduced_before_the_next_but_one_is_run_again(outcomes: Outcomes, memory: str) -> None:
    for log, ended in outcomes.of(f"{memory}, {SMALL} MB"):
        runs = [k for what, k in log if what == "run"]
        assert runs == list(reversed(range(DEPTH)))
        reduced = [sum(what == "reduce" for what, _ in log[: log.index(("run", k))]) for k in runs]
        assert all(more > less for less, more in pairwise(reduced[1:])), reduced
        assert ended == reduced[-1] >= DEPTH - 1


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_one_large_bucket_is_sent_after_the_last_gradient(outcomes: Outcomes, memory: str) -> None:
    for log, ended in outcomes.of(f"{memory}, {LARGE} MB"):
        assert log.index(("reduce", 0)) > log.index(("gradient", 0))
        assert ended == 0
