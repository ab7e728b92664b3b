"""SyncBatchNorm inside the blocks: a block with collectives of its own, run again in backward.

PyTorch has SyncBatchNorm for accelerators only: on a CPU its forward refuses, and five operators have no body. Here the CPU is let
through and the operators get one in plain torch, so that the real module, its autograd function and its collectives run between two
processes. The replay must issue its all-gathers in the same order on both ranks and leave the running statistics alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pair import Case, Outcomes, launch
from subjects import SAMPLES, SUBJECTS, assert_as_one, in_every_mode, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from problems import assert_same_bits

KIND = "conv+batchnorm"


def _columns(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along(x: Tensor, t: Tensor) -> Tensor:
    return t.view(1, -1, *[1] * (x.dim() - 2))


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _columns(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    x: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weights = (counts / counts.sum())[:, None]
    total = (weights * mean).sum(0)
    variance = (weights * (invstd**-2 - eps + (mean - total) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(total, momentum)
        running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
    return total, (variance + eps).rsqrt()


def normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return (x - _along(x, mean)) * _along(x, invstd * weight) + _along(x, bias)


def backward_reduce(
    gy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = gy.sum(_columns(x))
    product = (gy * (x - _along(x, mean))).sum(_columns(x))
    return total, product, product * invstd, total.clone()


def backward_elements(
    gy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, product: Tensor, counts: Tensor
) -> Tensor:
    centred = (x - _along(x, mean)) * _along(x, invstd**2 * product / counts.sum())
    return (gy - _along(x, total / counts.sum()) - centred) * _along(x, invstd * weight)


BODIES: dict[str, Any] = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalise,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elements,
}


def case_train(rank: int) -> dict[str, Tensor]:
    """Two steps in every mode, on this rank's half of each batch."""

    def run(mode: str) -> dict[str, Tensor]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(SUBJECTS[KIND].build(mode, "strict"))
        assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) == 9
        return train(DDP(model), SUBJECTS[KIND], rank)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, body in BODIES.items():
            library.impl(name, body, "CPU")
        lets_it_through = patch.object(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
        with lets_it_through, patch.object(DDP, "_passing_sync_batchnorm_handle", lambda *_: None):  # DDP's own check
            return in_every_mode(run)


def case_refused(memory: str, rank: int) -> str:
    """What torch says on a CPU that has no SyncBatchNorm."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(SUBJECTS[KIND].build(memory))
    try:
        model(SUBJECTS[KIND].batch(0)[0])
    except ValueError as error:
        return str(error)
    return "no error"


CASES: dict[str, Case] = {"refused": partial(case_refused, "reverse"), "train": case_train}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


def test_torch_itself_has_none_for_cpu(outcomes: Outcomes) -> None:
    """When this fails, torch has learned it: drop the operators above."""
    for message in outcomes.of("refused"):
        assert "SyncBatchNorm expected input tensor to be on GPU" in message


def test_statistics_move_once_and_are_the_same_on_both_ranks(outcomes: Outcomes) -> None:
    zero, one = ({n: t for n, t in found.items() if n.startswith("buffer")} for found in outcomes.of("train"))
    assert len(zero) == 27
    assert_same_bits(zero, one)
    assert {int(t) for n, t in zero.items() if n.endswith("num_batches_tracked")} == {2}


def test_two_processes_train_as_one_on_the_joined_batch(outcomes: Outcomes) -> None:
    """Here every weight sums over samples and pixels."""
    one = train(SUBJECTS[KIND].build("reverse"), SUBJECTS[KIND], None)
    for found in outcomes.of("train"):
        assert_as_one(found, one, SAMPLES * 5 * 5)
