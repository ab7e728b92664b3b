"""Tensor parallelism inside the blocks: the two linear maps of each MLP cut over two processes.

Both ranks train on the whole batch; a block's output is the sum of what the two ranks compute, so each run of a block, the replay
included, has a collective in it. The cut changes the order of a sum, hence the last bits against one process; the memory mode must
change none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pair import Case, Outcomes, launch
from subjects import MODES, SAMPLES, SUBJECTS, gradients_of, relative_distance, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from problems import Mlp, assert_same_bits

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
    found = {}
    for mode in MODES:
        torch.manual_seed(100)  # the same on both ranks: dropout stands outside the cut maps
        found[mode] = train(parallel(kind, mode, "strict", dtype), SUBJECTS[kind], None, dtype=dtype)
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
    return found["reverse"]


def case_sharded_too(rank: int) -> int:
    """FSDP2 on top, on a 1 × 2 mesh: parameters cut for tensor parallelism, then handed to fully_shard."""
    found = {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for mode in MODES:
        model = SUBJECTS["mlp"].build(mode, "strict")
        for block in SUBJECTS["mlp"].blocks(model):
            parallelize_module(block, mesh["tp"], PLAN)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        found[mode] = train(model, SUBJECTS["mlp"], None)
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
    return len(gradients_of(found["reverse"]))


TRAINED = {
    f"{kind}, {str(dtype).split('.')[1]}": partial(case_train, kind, dtype)
    for kind in ("mlp", "attention+dropout")
    for dtype in (torch.float32, torch.float64)
}
CASES: dict[str, Case] = {**TRAINED, "with FSDP2": case_sharded_too}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


@pytest.mark.parametrize("name", TRAINED)
def test_two_processes_train_as_one(outcomes: Outcomes, name: str) -> None:
    """To reduction-order rounding: `outer` adds 24 (or 16) terms in two halves, gradients one per sample and position."""
    kind, dtype = name.split(", ")[0], torch.float64 if name.endswith("64") else torch.float32
    torch.manual_seed(100)
    one = train(SUBJECTS[kind].build("store").to(dtype), SUBJECTS[kind], None, dtype=dtype)
    zero, other = outcomes.of(name)
    terms = 24 + SAMPLES * (5 if kind.startswith("attention") else 1)
    for part, expected in one.items():
        cut = CUT.get(".".join(part.split(".")[-2:])) if "blocks" in part else None
        if cut is not None and zero[part].shape != expected.shape:
            found = torch.cat([zero[part], other[part]], cut)
        else:
            found = zero[part]
            assert torch.equal(found, other[part]), part
        units = relative_distance(found, expected) / torch.finfo(dtype).eps
        assert units < 4 * terms, f"{part}: {units:.1f} units in the last place"


def test_parameters_were_cut(outcomes: Outcomes) -> None:
    zero, _ = outcomes.of("mlp, float32")
    assert zero["body.blocks.0.inner.weight"].shape == (12, 16)
    assert zero["body.blocks.0.outer.weight"].shape == (16, 12)
    assert Shard(0).dim == CUT["inner.weight"]


def test_with_fsdp2_on_top(outcomes: Outcomes) -> None:
    assert outcomes.of("with FSDP2") == [66, 66]  # 22 gradients, three steps
