"""The first promise: bits. Inversion and gradients, at every γ and depth that the design names."""

import copy
from fractions import Fraction

import pytest
import torch
from torch import nn

import retrograde as rg
from problems import KINDS, Mlp, conv, float_recurrence, same_in_every_mode, stack

GAMMAS = [0.1, 0.5, 0.9, 0.99, 0.9999, "1 - 1/(50k)", 1]


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("depth", [1, 17, 62, 167, 1_000, 10_000])
def test_inverse_recovers_the_input_bit_for_bit(gamma: float | str, depth: int) -> None:
    g = 1 - 1 / (50 * depth) if isinstance(gamma, str) else gamma
    shared = [Mlp(4, 4) for _ in range(7)]
    if g == 1:  # v grows without damping: keep the sum of all steps within reach
        for block in shared:
            block.outer.weight.data /= depth
    net = rg.MomentumNet([shared[k % 7] for k in range(depth)], gamma=g)
    x = torch.randn(2, 4)
    with torch.no_grad():
        state = net.encode(x)
        back = net.inverse(state)
    assert not torch.equal(state.x, back)
    assert torch.equal(back, state.fixed.decode(state.fixed.encode(x), x.dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2, 40])
@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("velocity", [None, "first"])
def test_gradients_are_those_of_stored_activations(kind: str, depth: int, form: str, velocity: str | None) -> None:
    blocks, x = stack(kind, depth)
    net = rg.MomentumNet(blocks, gamma=0.9, form=form, velocity=velocity, verify="blocks")
    found = same_in_every_mode(net, x.requires_grad_())
    assert all(torch.isfinite(g).all() for g in found.values())
    assert found["input"].any()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gamma"), [*((kind, 0.9) for kind in KINDS), ("mlp", 0.5), ("mlp", 1 - 1 / 50_000)])
def test_gradients_at_depth_1000(kind: str, gamma: float) -> None:
    """What a block is and what gamma is have nothing to do with each other: every kind, and every gamma, once."""
    blocks, x = stack(kind, 1_000)
    same_in_every_mode(rg.MomentumNet(blocks, gamma=gamma, verify="end"), x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mlp", "conv+batchnorm"])
def test_gradients_in_other_dtypes(dtype: torch.dtype, kind: str) -> None:
    blocks, x = stack(kind, 20)
    net = rg.MomentumNet(blocks, gamma=0.9, form="block", verify="blocks").to(dtype)
    found = same_in_every_mode(net, x.to(dtype).requires_grad_())
    assert found["output"].dtype == found["input"].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["branch", "block", "relu"])
def test_gradients_with_16_bit_state(dtype: torch.dtype, kind: str, form: str) -> None:
    blocks, x = stack(kind, 40)
    net = rg.MomentumNet(blocks, gamma=0.9, form=form, verify="blocks", state_bits=16).to(dtype)
    same_in_every_mode(net, x.to(dtype).requires_grad_())
    state = net.encode(x.to(dtype))
    assert {q.dtype for q in state.integers} == {torch.int16}


def test_16_bit_state_is_no_coarser_than_the_dtype_it_is_for() -> None:
    """Depth 30 in bfloat16: the error against float32 is within twice that of 32-bit state."""
    blocks, x, errors = [conv(16) for _ in range(30)], torch.randn(4, 16, 8, 8), {}
    with torch.no_grad():
        wanted = rg.MomentumNet(blocks, gamma=0.9)(x)
        for bits in ("auto", 16):
            net = rg.MomentumNet(copy.deepcopy(blocks), gamma=0.9, state_bits=bits).bfloat16()
            errors[bits] = float((net(x.bfloat16()).float() - wanted).norm() / wanted.norm())
    assert errors[16] < 2 * errors["auto"] < 0.05


def test_gamma_per_layer_with_ones() -> None:
    blocks, x = stack("mlp", 9)
    net = rg.MomentumNet(blocks, gamma=[0.5, 0.9, 1, 0.99, 0.1, 1, 1, 0.3, 0.75], verify="blocks")
    same_in_every_mode(net, x.requires_grad_())
    assert net.gamma[2] == 1


def test_learned_velocity() -> None:
    blocks, x = stack("mlp", 12)
    net = rg.MomentumNet(blocks, velocity=nn.Linear(8, 8), verify="end")
    found = same_in_every_mode(net, x.requires_grad_())
    assert found["velocity.weight"].any()
    assert torch.equal(net.inverse(net.encode(x)), net.encode(x).fixed.decode(net.encode(x).fixed.encode(x), x.dtype))


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
def test_within_1e_5_of_a_float64_recurrence(form: str) -> None:
    """γ = 0.9, depth 100, unit-scale data; fraction bits calibrated."""
    blocks = [Mlp(64, 64) for _ in range(100)]
    x = torch.randn(32, 64, requires_grad=True)
    net = rg.MomentumNet(blocks, gamma=0.9, form=form, memory="reverse")
    y = net(x)
    (y.square().mean()).backward()
    ours = [y.detach(), x.grad, *(p.grad for p in net.parameters())]
    exact = rg.MomentumNet(blocks, gamma=0.9).double()
    x64 = x.detach().double().requires_grad_()
    y64 = float_recurrence(exact.blocks, Fraction(9, 10), x64, form)
    parameters = list(exact.parameters())
    truth = [y64.detach(), *torch.autograd.grad(y64.square().mean(), [x64, *parameters])]
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    assert max(errors) < 1e-5, f"output {errors[0]:.1e}, input {errors[1]:.1e}, worst parameter {max(errors[2:]):.1e}"


def test_gradcheck_in_float64() -> None:
    net = rg.MomentumNet([Mlp(3, 4) for _ in range(6)], gamma=0.9, velocity="first", memory="reverse").double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    net(x)  # calibrate, so that the range is the same at every evaluation
    assert torch.autograd.gradcheck(net, (x,), eps=1e-6, atol=1e-6)
    assert torch.autograd.gradgradcheck(net, (x,), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("memory", ["store", "checkpoint", "auto"])
def test_gamma_zero_is_the_plain_network(form: str, memory: str) -> None:
    blocks, x = stack("conv+batchnorm", 5)
    for b in blocks:
        b[2].inplace = False
    net = rg.MomentumNet(blocks, gamma=0, form=form, memory=memory).eval()
    expected = x.clone().requires_grad_()
    x.requires_grad_()
    y = expected
    for block in blocks:
        y = block(y) if form == "block" else torch.relu(y + block(y)) if form == "relu" else y + block(y)
    y.square().mean().backward()
    out = net(x)
    out.square().mean().backward()
    assert torch.equal(out, y)
    assert torch.equal(x.grad, expected.grad)


def test_state_carries_gradients_of_x_and_v() -> None:
    blocks, x = stack("mlp", 10)
    net = rg.MomentumNet(blocks, gamma=0.9, fraction_bits=24)
    grads = []
    for mode in ("store", "reverse", "checkpoint"):
        net.memory = mode
        leaf = x.clone().requires_grad_()
        state = net.encode(leaf)
        grads.append(torch.autograd.grad(state.x.sum() + (state.v * 3).square().sum(), [leaf, *net.parameters()]))
        assert torch.equal(net.inverse(state), state.fixed.decode(state.fixed.encode(x), x.dtype))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))
