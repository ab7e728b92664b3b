"""Random networks for a while, and every failure that fuzzing ever found."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import fuzz_blocks
import pytest
import torch
from fuzz_case import PROGRAMS, draw
from fuzz_steps import compared
from run import fuzz
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from problems import Mlp

SECONDS = 40.0
FIXED = rg.FixedPoint(20, torch.int32)


@pytest.mark.slow
def test_random_networks_have_the_bits_of_stored_activations() -> None:
    tally = fuzz(seed=1_000_000, seconds=SECONDS)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.verdicts["same"] > 0.8 * tally.networks
    assert tally.networks > 20


def test_backward_in_a_new_thread_computes_with_as_many_threads() -> None:
    """In a process of its own: OpenMP's number of threads is that of the machine, until PyTorch is asked for its own."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--seed", "1000316", "--only"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert " 0 mismatches" in run.stdout, run.stdout + run.stderr


def test_the_same_seed_draws_the_same_case_and_all_kinds_of_work_are_drawn() -> None:
    cases = [draw(seed) for seed in range(600)]
    assert cases == [draw(seed) for seed in range(600)]
    assert {c.program for c in cases} == set(PROGRAMS)
    assert all(str(c).startswith(f"seed {c.seed}:") and "\n" not in str(c) for c in cases)
    assert 60 < sum(c.signed for c in cases) < 130
    assert {len(c.order) for c in cases} >= {1, 2, 40}
    assert {c.dtype for c in cases} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that differs by a thousandth from one run to the next."""
    original, calls = fuzz_blocks.Mlp.forward, count()

    def drifting(self: fuzz_blocks.Mlp, x: Tensor) -> Tensor:
        return original(self, x) * (1 + 0.001 * next(calls))

    monkeypatch.setattr(fuzz_blocks.Mlp, "forward", drifting)
    cases = [c for c in map(draw, range(100)) if "mlp" in c.kinds and c.program == "backward" and len(c.order) < 10]
    assert any(compared(case)[0] == "mismatch" for case in cases[:3])


@pytest.mark.parametrize("second_order", [False, True])
def test_batchnorm_and_instancenorm_together(second_order: bool) -> None:
    """Seed 681: InstanceNorm moves the version of scratch statistics that BatchNorm has saved."""
    norms: list[nn.Module] = [nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(4)]
    blocks = norms if second_order else [nn.Sequential(*norms[::-1])]
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    net = rg.MomentumNet(blocks, memory="reverse", fixed_point=FIXED)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=second_order)
    if second_order:
        gradient.square().sum().backward()


class Late(nn.Module):
    """Its shift has a gradient before anything that it saved is asked for."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8, bias=False) if saves else nn.Identity(), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


@pytest.mark.parametrize("saves", [True, False])
def test_optimizer_in_backward_with_gradients_that_come_early(saves: bool) -> None:
    """Seeds 151, 502, 920: the hook has changed the parameter when the block is run again."""
    net = rg.MomentumNet([Mlp(), Late(saves), Mlp()], memory="reverse", fixed_point=FIXED)

    @torch.no_grad()
    def update(p: Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    net(torch.randn(3, 8)).square().sum().backward()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x.sin()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        assert ctx.saved_tensors is not None  # type: ignore[attr-defined]
        return g * ctx.saved_tensors[0].cos()  # type: ignore[attr-defined]


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="the tape is let go at the first read of the first block")
def test_a_function_that_reads_its_saved_tensors_twice() -> None:
    """Seed 66: any block but the first may."""

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(x)

    x = torch.randn(3, 8, requires_grad=True)
    rg.MomentumNet([Mlp(), Sine(), Mlp()], memory="reverse", fixed_point=FIXED)(x).sum().backward()
    rg.MomentumNet([Sine(), Mlp()], memory="reverse", fixed_point=FIXED)(x).sum().backward()


class Energy(nn.Module):
    """f = −∇E, in grad mode whatever the mode around it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_checkpoint_around_a_network_that_surveys_its_first_batch() -> None:
    """Seed 100621."""
    net, x = rg.MomentumNet([Energy() for _ in range(3)], memory="store"), torch.randn(3, 8, requires_grad=True)
    checkpoint(net, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
def test_16_bit_state_far_out_of_range_is_rewound_all_the_same(form: str) -> None:
    """Seeds 501186, 502450, 503038: what wraps in a step on must wrap in the step back."""
    blocks = [nn.Linear(8, 8) for _ in range(8)]
    x = torch.randn(3, 8) * 1e4
    net = rg.MomentumNet(
        blocks, form=form, memory="reverse", fixed_point=rg.FixedPoint(6, torch.int16), overflow="nan", verify="strict"
    )
    y = net(x)
    assert y.isnan().all()
    y.sum().backward()


@pytest.mark.parametrize("converted", [False, True])
def test_optimizer_in_backward_of_the_plain_network(converted: bool) -> None:
    """Seed 8121: γ = 0, where inputs are kept."""
    net: nn.Module = rg.MomentumNet([Mlp(), Late(True), Mlp()], gamma=0, memory="checkpoint")
    if converted:
        net = rg.convert(nn.Sequential(*[Late(True) for _ in range(4)]), stages=["*"], gamma=0, memory="checkpoint")

    @torch.no_grad()
    def update(p: Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    net(torch.randn(3, 8)).square().sum().backward()
