"""FSDP2 (`fully_shard`) around each block and the whole model, on two real processes with a CPU mesh.

A block's parameters are gathered when it runs, in forward and in the replay; the replay comes lazily,
when FSDP2's own hooks have gathered them for backward. Reverse and checkpoint mode must give the bits of store mode under the same
sharding, and without mixed precision the bits of DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pair import Case, Outcomes, launch
from subjects import (
    MODES,
    SUBJECTS,
    assert_as_one,
    gradients_of,
    here,
    in_every_mode,
    joined,
    relative_distance,
    terms_of,
    train,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import retrograde as rg
from problems import Mlp, assert_same_bits

pytestmark = pytest.mark.slow
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS: dict[str, dict[str, Any]] = {
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "bf16, reshard": {"reshard_after_forward": True, "mp_policy": BF16},
    "bf16, keep": {"reshard_after_forward": False, "mp_policy": BF16},
}


def sharded(kind: str, memory: str, way: str, verify: str = "strict", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = SUBJECTS[kind].build(memory, verify).to(dtype)
    mesh = init_device_mesh("cpu", (2,))
    for block in SUBJECTS[kind].blocks(model):
        fully_shard(block, mesh=mesh, **WAYS[way])
    fully_shard(model, mesh=mesh, **WAYS[way])
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def gradients_here(model: nn.Module) -> dict[str, Tensor]:
    return {name: here(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients and parameters put together from the parts of both ranks: FSDP2 cuts along the first dimension."""
    return {n: torch.cat([part[n] for part in parts]) for n in parts[0] if not n.startswith(("output", "buffer"))}


def every_mode(
    kind: str, way: str, rank: int, prepare: Callable[[nn.Module], None] = lambda model: None, **how: Any
) -> dict[str, Tensor]:
    def run(mode: str) -> dict[str, Tensor]:
        model = sharded(kind, mode, way)
        prepare(model)
        return train(model, SUBJECTS[kind], rank, **how)

    return in_every_mode(run, 100 + rank)


def case_way(kind: str, way: str, rank: int) -> dict[str, Tensor]:
    return every_mode(kind, way, rank)


def halved(kind: str, model: nn.Module) -> None:
    """Have the gradient of what block 2 hands on halved."""

    def hook(module: nn.Module, args: Any, x: Tensor) -> None:
        if x.requires_grad:
            x.register_hook(lambda g: g / 2)

    SUBJECTS[kind].blocks(model)[2].register_forward_hook(hook)


def case_looked_at(way: str, rank: int) -> dict[str, Tensor]:
    return every_mode("converted", way, rank, prepare=partial(halved, "converted"))


def case_accumulate(way: str, every_block: bool, rank: int) -> dict[str, Tensor]:
    """Two micro-batches a step; gradients are reduced in the second one's backward pass only."""

    def run(mode: str) -> dict[str, Tensor]:
        model: Any = sharded("mlp", mode, way)

        @contextmanager
        def sync(last: bool) -> Iterator[None]:
            model.set_requires_gradient_sync(last)
            if not every_block:  # keep parameters gathered from one micro-batch to the next
                model.set_reshard_after_backward(last)
            yield

        return train(model, SUBJECTS["mlp"], rank, micro=2, sync=sync)

    return in_every_mode(run)


def freeze(model: nn.Module) -> None:
    blocks = SUBJECTS["mlp"].blocks(model)
    for part in (model.get_submodule("stem"), blocks[0], blocks[3]):
        part.requires_grad_(False)


def case_frozen(way: str, rank: int) -> dict[str, Tensor]:
    found = every_mode("mlp", way, rank, freeze)
    assert not [name for name in gradients_of(found) if "blocks.0." in name or "blocks.3." in name or "stem" in name]
    return found


def case_before(rank: int) -> dict[str, Tensor]:
    """Blocks sharded first and the momentum network built of them after; and the other way round."""
    found = {}
    for order in ("blocks first", "network first"):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            blocks = [Mlp(6, 10) for _ in range(5)]
        if order == "network first":
            net = rg.MomentumNet(blocks, memory="reverse", verify="strict")
        for block in blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        if order == "blocks first":
            net = rg.MomentumNet(blocks, memory="reverse", verify="strict")
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        x = SUBJECTS["mlp"].batch(rank)[0].requires_grad_()
        net(x).square().mean().backward()
        found[order] = gradients_here(net)
        assert len(found[order]) == 15
    assert_same_bits(found["blocks first"], found["network first"])
    return found["blocks first"]


def case_blocks_alone_in_bf16(rank: int) -> str:
    """Blocks in bf16 inside a float32 model: refused as a change of dtype, and right with output_dtype=float32."""
    x, _ = SUBJECTS["mlp"].batch(rank)

    def run(mode: str, output: torch.dtype | None = torch.float32) -> dict[str, Tensor]:
        model = SUBJECTS["mlp"].build(mode, "strict")
        for block in SUBJECTS["mlp"].blocks(model):
            policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=output)
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        model(x).square().mean().backward()
        return gradients_here(model)

    assert len(in_every_mode(run)) == 22
    with pytest.raises(ValueError, match="bfloat16") as refused:
        run("reverse", None)
    return str(refused.value)


def case_state_dict(rank: int) -> dict[str, Tensor]:
    """Whole weights out of a trained sharded model, into a plain one and back into a sharded one."""
    model = sharded("mlp", "reverse", "reshard")
    train(model, SUBJECTS["mlp"], rank)
    saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:  # the whole one is handed to rank 0 only
        plain = SUBJECTS["mlp"].build("reverse")
        assert saved.keys() == plain.state_dict().keys()
        plain.load_state_dict(saved)
    again = sharded("mlp", "reverse", "keep")
    set_model_state_dict(again, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)  # before the pass: then they are the shards
    x, _ = SUBJECTS["mlp"].batch(9)
    y = again(x)
    if rank == 0:
        assert torch.equal(plain(x), y)
    y.square().mean().backward()
    optimizer.step()
    state = get_optimizer_state_dict(again, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"output": y.detach(), "whole": torch.tensor(len(saved)), "moments": torch.tensor(len(state["state"]))}


def case_joined(kind: str, dtype: torch.dtype, rank: int) -> dict[str, Tensor]:
    return train(sharded(kind, "reverse", "reshard", dtype=dtype), SUBJECTS[kind], rank, steps=6, dtype=dtype)


def case_collectives(memory: str, rank: int) -> list[list[str]]:
    """Which collectives a step issues, in order, first step and second."""
    model = sharded("mlp", memory, "reshard")
    x, _ = SUBJECTS["mlp"].batch(rank)
    issued: list[list[str]] = []
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            model(x).square().mean().backward()
        events = sorted(trace.events() or [], key=lambda e: e.time_range.start)
        issued.append([e.name for e in events if e.name.startswith("c10d::")])
        dist.barrier()
    return issued


BITS: dict[str, Case] = {
    f"{kind}, {way}": partial(case_way, kind, way) for kind in ("mlp", "attention+dropout", "converted") for way in WAYS
}
BITS |= {f"branch, {way}": partial(case_way, "branch", way) for way in ("reshard", "keep")}
BITS |= {f"looked at, {way}": partial(case_looked_at, way) for way in ("reshard", "keep")}
BITS |= {f"conv+batchnorm, {way}": partial(case_way, "conv+batchnorm", way) for way in ("reshard", "keep")}
BITS |= {f"accumulate, {way}": partial(case_accumulate, way, True) for way in ("reshard", "keep")}
BITS |= {"accumulate, kept gathered": partial(case_accumulate, "keep", False), "built before and after": case_before}
BITS |= {f"frozen, {way}": partial(case_frozen, way) for way in ("reshard", "keep")}
JOINED = joined([kind for kind, subject in SUBJECTS.items() if subject.alone], case_joined)
SINGLE: dict[str, Case] = {
    "blocks alone in bf16": case_blocks_alone_in_bf16,
    "state dict": case_state_dict,
    **{f"collectives {mode}": partial(case_collectives, mode) for mode in MODES},
}
CASES: dict[str, Case] = {**BITS, **JOINED, **SINGLE}


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return launch(CASES)


@pytest.mark.parametrize("name", BITS)
def test_every_mode_has_the_same_bits(outcomes: Outcomes, name: str) -> None:
    zero, one = outcomes.of(name)
    assert zero.keys() == one.keys()


@pytest.mark.parametrize("kind", ["mlp", "attention+dropout", "converted"])
def test_keeping_parameters_gathered_changes_no_bit(outcomes: Outcomes, kind: str) -> None:
    for precision in ("", "bf16, "):
        for a, b in zip(
            outcomes.of(f"{kind}, {precision}reshard"), outcomes.of(f"{kind}, {precision}keep"), strict=True
        ):
            assert_same_bits(a, b)


@pytest.mark.parametrize("kind", ["mlp", "attention+dropout", "converted", "conv+batchnorm"])
def test_reduced_gradient_is_the_mean_of_the_halves_to_the_bit(outcomes: Outcomes, kind: str) -> None:
    found = whole(outcomes.of(f"{kind}, reshard"))
    assert_same_bits({n: g for n, g in found.items() if n.startswith("gradient 0")}, mean_of_halves(kind))


@pytest.mark.parametrize("case", ["branch", "looked at"])
def test_reduced_gradient_is_the_mean_of_the_halves_where_it_is_looked_at(outcomes: Outcomes, case: str) -> None:
    """To rounding: FSDP2's own hook on a branch leads the gradient through it, too."""
    kind = "branch" if case == "branch" else "converted"
    expected = mean_of_halves(kind, *[] if case == "branch" else [partial(halved, kind)])
    found = whole(outcomes.of(f"{case}, reshard"))
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6)


def mean_of_halves(kind: str, prepare: Callable[[nn.Module], None] = lambda model: None) -> dict[str, Tensor]:
    """Without FSDP2, one process after the other."""
    halves = []
    for rank in (0, 1):
        torch.manual_seed(100 + rank)
        model = SUBJECTS[kind].build("store")
        prepare(model)
        halves.append(gradients_of(train(model, SUBJECTS[kind], rank, steps=1)))
    return {n: (halves[0][n] + halves[1][n]) / 2 for n in halves[0]}


def test_mixed_precision_was_on(outcomes: Outcomes) -> None:
    found, _ = outcomes.of("mlp, bf16, reshard")
    outputs = [t for name, t in found.items() if name.startswith("output")]
    assert {t.dtype for t in outputs} == {torch.bfloat16}
    exact, _ = outcomes.of("mlp, reshard")
    apart = max(relative_distance(g, exact[name]) for name, g in gradients_of(found).items() if "gradient 0" in name)
    assert 1e-4 < apart < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", JOINED)
def test_two_processes_train_as_one_on_the_joined_batch(outcomes: Outcomes, name: str) -> None:
    kind, dtype = name.split()[1], torch.float64 if name.endswith("64") else torch.float32
    one = train(SUBJECTS[kind].build("reverse").to(dtype), SUBJECTS[kind], None, steps=6, dtype=dtype)
    assert_as_one(whole(outcomes.of(name)), one, terms_of(kind))


def test_blocks_alone_in_bf16_are_refused_with_both_dtypes_named(outcomes: Outcomes) -> None:
    for message in outcomes.of("blocks alone in bf16"):
        assert "torch.float32" in message
        assert "torch.bfloat16" in message


def test_state_dict_is_that_of_the_plain_model(outcomes: Outcomes) -> None:
    zero, one = outcomes.of("state dict")
    assert torch.equal(zero["output"], one["output"])
    assert int(zero["whole"]) == int(zero["moments"]) == 22  # weights of the model, and moments of the optimizer


def test_both_ranks_issue_the_same_collectives_in_the_same_order(outcomes: Outcomes) -> None:
    for mode in MODES:
        zero, one = outcomes.of(f"collectives {mode}")
        assert zero == one
    first, second = outcomes.of("collectives reverse")[0]
    assert first == second  # nothing is run in secret
    assert second == outcomes.of("collectives store")[0][1]  # the replay gathers nothing that backward would not
