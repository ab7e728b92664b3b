"""DistributedDataParallel around a model with a momentum stack, on two real processes.

Three claims, for every way of using DDP: reverse and checkpoint mode give the bits of store mode; both ranks hold the same
reduced gradient; and it is the right one, either to the bit (the mean of the gradients that each half batch gives alone) or to
rounding (training by one process on the joined batch).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from pair import Case, Outcomes, launch
from subjects import SUBJECTS, assert_as_one, gradients_of, in_every_mode, joined, relative_distance, terms_of, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from problems import assert_same_bits

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.001},
    "no_broadcast": {"broadcast_buffers": False},
}


def every_mode(kind: str, rank: int, wrap: Callable[[nn.Module], nn.Module], **how: Any) -> dict[str, Tensor]:
    """Dropout draws other numbers on each rank, the same in each mode."""
    subject = SUBJECTS[kind]
    return in_every_mode(lambda mode: train(wrap(subject.build(mode, "strict")), subject, rank, **how), 100 + rank)


def case_way(kind: str, way: str, rank: int) -> dict[str, Tensor]:
    return every_mode(kind, rank, lambda model: DDP(model, **WAYS[way]))


def case_accumulate(kind: str, way: str, rank: int) -> dict[str, Tensor]:
    """Two micro-batches a step, the first under no_sync."""

    def run(mode: str) -> dict[str, Tensor]:
        ddp = DDP(SUBJECTS[kind].build(mode, "strict"), **WAYS[way])
        sync = lambda last: nullcontext() if last else ddp.no_sync()  # noqa: E731
        return train(ddp, SUBJECTS[kind], rank, micro=2, sync=sync)

    return in_every_mode(run, 100 + rank)


def case_hook(hook: Callable[..., Any], rank: int) -> dict[str, Tensor]:
    def wrap(model: nn.Module) -> nn.Module:
        ddp = DDP(model)
        ddp.register_comm_hook(None, hook)
        return ddp

    return every_mode("mlp", rank, wrap)


def case_frozen(way: str, rank: int) -> dict[str, Tensor]:
    """Stem, first and a middle block frozen: the lowest blocks save nothing, and the tape must still rewind past them."""

    def wrap(model: nn.Module) -> nn.Module:
        blocks = SUBJECTS["attention+dropout"].blocks(model)
        for part in (model.get_submodule("stem"), blocks[0], blocks[3]):
            part.requires_grad_(False)
        return DDP(model, **WAYS[way])

    found = every_mode("attention+dropout", rank, wrap)
    trained = {name.split(" of ")[1].rsplit(".", 2)[0] for name in gradients_of(found)}
    assert not any(name.startswith(("stem", "body.blocks.0", "body.blocks.3")) for name in trained), trained
    return found


class WithSpare(nn.Module):
    """A model with a layer that is never used, and one that is used in every other call only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.never, self.sometimes, self.calls = model, nn.Linear(3, 3), nn.Linear(3, 3), 0
        for layer in (self.never, self.sometimes):
            nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.model(x)
        return self.sometimes(y) if self.calls % 2 else y


def case_unused(rank: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        spare = WithSpare(nn.Identity())

    def wrap(model: nn.Module) -> nn.Module:
        whole_model = copy.deepcopy(spare)
        whole_model.model = model
        return DDP(whole_model, find_unused_parameters=True)

    found = every_mode("mlp", rank, wrap)
    assert not [name for name in gradients_of(found) if "never" in name]
    assert "gradient 0 of sometimes.weight" in found
    return found


def case_unused_undeclared(rank: int) -> str:
    """Without find_unused_parameters DDP itself refuses, as it does for any model."""
    ddp = DDP(WithSpare(SUBJECTS["mlp"].build("reverse")))
    x, _ = SUBJECTS["mlp"].batch(0)
    ddp(x).sum().backward()
    try:
        ddp(x)
    except RuntimeError as error:
        return str(error)
    return "no error"


def case_autocast(rank: int) -> dict[str, Tensor]:
    return every_mode("mlp", rank, DDP, around=partial(torch.autocast, "cpu", torch.bfloat16))


def case_buffers(rank: int) -> dict[str, Tensor]:
    """Statistics as the stem finds them at the start of each pass: rank 0's, and moved once per step."""
    seen: dict[str, Tensor] = {}
    model = SUBJECTS["conv+batchnorm"].build("reverse")
    for b in model.buffers():
        if rank == 1 and b.is_floating_point():
            b.add_(1)  # what the broadcast must put right
    calls = iter(range(100))

    def note(*_: Any) -> None:
        now = next(calls)
        seen.update({f"{now} {name}": b.clone() for name, b in model.named_buffers()})

    model.get_submodule("stem").register_forward_pre_hook(note)
    train(DDP(model), SUBJECTS["conv+batchnorm"], rank)
    counts = {int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts == {2}, f"batches counted after 2 steps: {counts}"
    return seen


def case_uneven(rank: int) -> dict[str, Tensor]:
    """Rank 1 has two steps more than rank 0: `join` answers its all-reduces on rank 0's behalf."""

    def run(mode: str) -> dict[str, Tensor]:
        ddp = DDP(SUBJECTS["mlp"].build(mode, "strict"))
        with ddp.join():
            train(ddp, SUBJECTS["mlp"], rank, steps=2 + 2 * rank)
        return {name: p.detach() for name, p in ddp.named_parameters()}

    return in_every_mode(run)


def case_joined(kind: str, dtype: torch.dtype, rank: int) -> None:
    """Six steps on two processes, and on one process with the joined batch."""
    subject, runs = SUBJECTS[kind], []
    for wrap, half in ((DDP, rank), (lambda model: model, None)):
        runs.append(train(wrap(subject.build("reverse", "strict").to(dtype)), subject, half, steps=6, dtype=dtype))
    two, one = ({name.replace("module.", ""): t for name, t in run.items() if "output" not in name} for run in runs)
    assert_as_one(two, one, terms_of(kind))


KINDS_AND_WAYS = [(kind, way) for kind in SUBJECTS for way in ("default", "static_graph", "find_unused_parameters")]
KINDS_AND_WAYS += [("mlp", "gradient_as_bucket_view"), ("mlp", "small_buckets"), ("conv+batchnorm", "no_broadcast")]
BY_HAND = {f"{kind}, {way}": partial(case_way, kind, way) for kind, way in KINDS_AND_WAYS}
ACCUMULATED = {
    f"accumulate {kind}, {way}": partial(case_accumulate, kind, way)
    for kind, way in [
        ("mlp", "default"),
        ("mlp", "gradient_as_bucket_view"),
        ("attention+dropout", "find_unused_parameters"),
    ]
}
OTHERS: dict[str, Case] = {
    "unused": case_unused,
    "frozen": partial(case_frozen, "default"),
    "frozen, static_graph": partial(case_frozen, "static_graph"),
    "allreduce hook": partial(case_hook, allreduce_hook),
    "fp16 hook": partial(case_hook, fp16_compress_hook),
    "autocast": case_autocast,
}
JOINED = joined([kind for kind, subject in SUBJECTS.items() if subject.alone], case_joined)
SINGLE: dict[str, Case] = {"undeclared": case_unused_undeclared, "buffers": case_buffers, "uneven": case_uneven}
CASES: dict[str, Case] = {**BY_HAND, **ACCUMULATED, **OTHERS, **JOINED, **SINGLE}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


def half_gradients(kind: str, rank: int, micro: int) -> dict[str, Tensor]:
    """The first step's gradients of one half batch alone, with stored activations and without DDP."""
    torch.manual_seed(100 + rank)
    return gradients_of(train(SUBJECTS[kind].build("store"), SUBJECTS[kind], rank, steps=1, micro=micro))


@pytest.mark.parametrize("name", [*BY_HAND, *ACCUMULATED])
def test_reduced_gradient_is_the_mean_of_the_halves_to_the_bit(outcomes: Outcomes, name: str) -> None:
    zero, one = map(gradients_of, outcomes.of(name))
    assert_same_bits(zero, one)
    kind, micro = name.removeprefix("accumulate ").split(", ")[0], 2 if name in ACCUMULATED else 1
    halves = [half_gradients(kind, rank, micro) for rank in (0, 1)]
    # DDP halves before it adds: exact, and a sum of two has one order only
    expected = {n: halves[0][n] / 2 + halves[1][n] / 2 for n in halves[0]}
    assert_same_bits({n: g for n, g in zero.items() if n.startswith("gradient 0")}, expected)


@pytest.mark.parametrize("name", OTHERS)
def test_every_mode_has_the_same_bits_and_both_ranks_the_same_gradient(outcomes: Outcomes, name: str) -> None:
    zero, one = outcomes.of(name)
    assert gradients_of(zero)
    assert_same_bits(gradients_of(zero), gradients_of(one))


def test_fp16_hook_compresses_and_plain_hook_does_not(outcomes: Outcomes) -> None:
    plain, _ = outcomes.of("mlp, default")
    same, _ = outcomes.of("allreduce hook")
    compressed, _ = outcomes.of("fp16 hook")
    assert_same_bits(plain, same)
    for name, g in gradients_of(compressed).items():
        if name.startswith("gradient 0"):
            assert torch.equal(g, g.half().float())  # what went over the wire had 16 bits
            assert relative_distance(g, plain[name]) < 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("name", JOINED)
def test_two_processes_train_as_one_on_the_joined_batch(outcomes: Outcomes, name: str) -> None:
    outcomes.of(name)


def test_unused_parameters_undeclared_are_refused_by_ddp(outcomes: Outcomes) -> None:
    for message in outcomes.of("undeclared"):
        assert "find_unused_parameters=True" in message


def test_statistics_are_broadcast_from_rank_0_before_each_pass(outcomes: Outcomes) -> None:
    zero, one = outcomes.of("buffers")
    assert len(zero) == 2 * 3 * (1 + 2 * 4)  # two passes, three buffers per BatchNorm
    assert_same_bits(zero, one)


def test_uneven_inputs_end_with_the_same_weights(outcomes: Outcomes) -> None:
    zero, one = outcomes.of("uneven")
    assert_same_bits(zero, one)
