"""Tensor parallelism inside the blocks: the two linear maps of each MLP cut over two processes.

Both ranks train on the whole batch; a block's output is the sum of what the two ranks compute, so each run of a block, the replay
included, has a collective in it. The cut changes the order of a sum, hence the last bits against one process; the memory mode must
change none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pair import Case, Outcomes, launch
from subjects import SUBJECTS, assert_as_one, gradients_of, in_every_mode, joined, terms_of, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from problems import Mlp

PLAN: dict[str, Any] = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
# along which dimension a parameter is cut; others are whole on both ranks
CUT = {"inner.weight": 0, "inner.bias": 0, "outer.weight": 1}


def parallel(kind: str, memory: str, verify: str, dtype: torch.dtype) -> nn.Module:
    model = SUBJECTS[kind].build(memory, verify).to(dtype)
    mesh = init_device_mesh("cpu", (2,))
    mlps = [m for m in model.modules() if isinstance(m, Mlp)]
    for mlp in mlps:
        parallelize_module(mlp, mesh, PLAN)
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == 3 * len(mlps)
    return model


def case_train(kind: str, dtype: torch.dtype, rank: int) -> dict[str, Tensor]:
    """Dropout, which stands outside the cut maps, draws the same on both ranks."""
    return in_every_mode(lambda mode: train(parallel(kind, mode, "strict", dtype), SUBJECTS[kind], None, dtype=dtype))


def case_sharded_too(rank: int) -> int:
    """FSDP2 on top, on a 1 × 2 mesh: parameters cut for tensor parallelism, then handed to fully_shard."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def run(mode: str) -> dict[str, Tensor]:
        model = SUBJECTS["mlp"].build(mode, "strict")
        for block in SUBJECTS["mlp"].blocks(model):
            parallelize_module(block, mesh["tp"], PLAN)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return train(model, SUBJECTS["mlp"], None)

    return len(gradients_of(in_every_mode(run)))


TRAINED = joined(("mlp", "attention+dropout"), case_train)
CASES: dict[str, Case] = {**TRAINED, "with FSDP2": case_sharded_too}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_as_one(outcomes: Outcomes, name: str) -> None:
    """To reduction-order rounding: `outer` adds 24 (or 16) terms in two halves, gradients one per sample and position."""
    kind, dtype = name.split()[1], torch.float64 if name.endswith("64") else torch.float32
    torch.manual_seed(100)
    one = train(SUBJECTS[kind].build("store").to(dtype), SUBJECTS[kind], None, dtype=dtype)
    zero, other = outcomes.of(name)
    found = dict(zero)
    for part, expected in one.items():
        if zero[part].shape != expected.shape:
            found[part] = torch.cat([zero[part], other[part]], CUT[".".join(part.split(".")[-2:])])
        else:
            assert torch.equal(zero[part], other[part]), part
    assert_as_one(found, one, 24 + terms_of(kind))


def test_parameters_were_cut(outcomes: Outcomes) -> None:
    zero, _ = outcomes.of("joined mlp float32")
    assert zero["body.blocks.0.inner.weight"].shape == (12, 16)
    assert zero["body.blocks.0.outer.weight"].shape == (16, 12)
    assert Shard(0).dim == CUT["inner.weight"]


def test_with_fsdp2_on_top(outcomes: Outcomes) -> None:
    assert outcomes.of("with FSDP2") == [44, 44]  # 22 gradients, two steps
