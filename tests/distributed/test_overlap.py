"""Gradients are reduced while backward still runs.

The blocks are ordinary parts of the graph, so a block's gradients are there as soon as its turn is over, and DDP sends them while
the blocks below are being run again. Shown twice, by the order of events (never by time): in a log that hooks write, and in a
torch.profiler trace. Before block 0 is run again the test waits for every reduction started so far: they can finish, so they did
not need the rest of the backward pass. The control is one bucket for everything, which can only be sent when the last gradient
is there.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pair import Outcomes, launch
from subjects import SUBJECTS
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

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
        self.wait = lambda: torch.futures.wait_all(under_way)
        block.get_parameter("inner.weight").register_hook(lambda gradient: log.append(("gradient", k)))

    def forward(self, x: Tensor) -> Tensor:
        self.note(("run", self.k))
        if self.k == 0:
            self.wait()
        with record_function(f"run block {self.k}"):
            return self.block(x)


def case_order(memory: str, bucket_mb: float, rank: int) -> dict[str, Any]:
    """What the second step's backward pass did, in order, by the log and by the trace.

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
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss.backward()
    events = trace.events()
    assert events is not None
    runs = {e.name: e.time_range.start for e in events if e.name.startswith("run block")}
    lowest = runs.get("run block 0", float("-inf"))
    return {
        "log": log,
        "sent": sum(e.name == "gloo:all_reduce" for e in events),
        "started before block 0": sum(e.name == "c10d::allreduce_" and e.time_range.start < lowest for e in events),
        "finished before block 0": sum(e.name == "gloo:all_reduce" and e.time_range.end < lowest for e in events),
    }


CASES = {f"{m}, {mb} MB": partial(case_order, m, mb) for m in ("reverse", "checkpoint") for mb in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_each_block_is_being_reduced_before_the_next_but_one_is_run_again(outcomes: Outcomes, memory: str) -> None:
    for found in outcomes.of(f"{memory}, {SMALL} MB"):
        log = found["log"]
        runs = [k for what, k in log if what == "run"]
        assert runs == list(reversed(range(DEPTH)))
        reduced = [sum(what == "reduce" for what, _ in log[: log.index(("run", k))]) for k in runs]
        assert all(more > less for less, more in pairwise(reduced[1:])), reduced


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_trace_shows_the_reductions_above_done_before_block_0_is_run_again(outcomes: Outcomes, memory: str) -> None:
    for found in outcomes.of(f"{memory}, {SMALL} MB"):
        assert found["sent"] == sum(what == "reduce" for what, _ in found["log"])
        above = sum(what == "reduce" for what, _ in found["log"][: found["log"].index(("run", 0))])
        assert above >= DEPTH - 1
        assert found["started before block 0"] == above
        assert found["finished before block 0"] >= 1  # when the last one ends is a matter of time


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_one_large_bucket_is_sent_after_the_last_gradient(outcomes: Outcomes, memory: str) -> None:
    for found in outcomes.of(f"{memory}, {LARGE} MB"):
        log = found["log"]
        assert log.index(("reduce", 0)) > log.index(("gradient", 0))
        assert found["started before block 0"] == 0
