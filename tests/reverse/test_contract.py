"""The contract: however blocks are remembered, no bit changes of outputs, gradients, buffers and random numbers.

    scheme × blocks × dtype       two steps of training, in every way to remember
    scheme × condition            what is done around a step, in every way to remember; what users do with autograd, parameters,
                                  inputs and modules stands in tests/hazards, and is run in every scheme as well
    scheme × blocks × γ, depth    the inverse of the whole network

Each is compared with the same network that stores everything. That the network itself is the right one is compared with a recurrence
in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from problems import KINDS as BASIC
from problems import Mlp, conv, float_recurrence
from ways import (
    DEPTH,
    KEPT,
    KINDS,
    PLANS,
    SCHEMES,
    Plan,
    Whole,
    assert_equal,
    begun,
    given,
    inner,
    left_by,
    network,
    remembered,
)

Run = Callable[[nn.Module, Tensor], list[Tensor | None]]
FORMS = SCHEMES[:3]
SIGN = rg.RandomSign(1 / 8)
SIGNS = rg.RandomSign([0.5, 0.9, 1 / 3, 0.125, 0.1, 0.25, 0.3])


def plans_of(scheme: str) -> tuple[Plan, ...]:
    return KEPT if scheme == "residual" else PLANS


def step(model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """A step of training from the same random state."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(7)
    y = model(leaf, *args, **kwargs)
    y.float().square().mean().backward()
    return [y.detach(), leaf.grad, *left_by(model)]


def two_steps(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    first = step(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
    return [*first, *step(model, 0.9 * x)]


# scheme × blocks × dtype -----------------------------------------------------------------------------------------------

HELD = [
    (torch.float32, "auto"), (torch.float64, "auto"), (torch.bfloat16, "auto"), (torch.float16, "auto"),
    (torch.float32, "int16"), (torch.bfloat16, "int16"), (torch.float16, "int16"),
]  # fmt: skip
BLOCKS = [(kind, *held) for kind in KINDS for held in (HELD if kind in BASIC else HELD[:1])]
"""Kinds of blocks, their dtype, and how the state is held. What a dtype is has nothing to do with the rarer kinds."""


@pytest.mark.parametrize(("kind", "dtype", "fixed_point"), BLOCKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_way_to_remember_changes_a_bit(scheme: str, kind: str, dtype: torch.dtype, fixed_point: str) -> None:
    make, shape = KINDS[kind]
    net = network(scheme, [make() for _ in range(DEPTH)], fixed_point=fixed_point).to(dtype)
    x = given(scheme, torch.randn(shape)).to(dtype)
    wanted = two_steps(copy.deepcopy(net), x)
    assert wanted[0].dtype == wanted[1].dtype == dtype
    assert wanted[1].isfinite().all()
    assert wanted[1].any()
    for k, plan in enumerate(plans_of(scheme)):
        assert_equal(two_steps(remembered(net, plan, verify=("strict", "auto")[k % 2]), x), wanted, plan)


@pytest.mark.parametrize("form", ["branch", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_laid_out_by_channels_stays_so(dtype: torch.dtype, form: str) -> None:
    net = network(form, [conv(3) for _ in range(DEPTH)], fixed_point="auto").to(dtype)
    x = torch.randn(3, 3, 5, 7, dtype=dtype).contiguous(memory_format=torch.channels_last)  # sizes that fill no byte
    wanted = step(copy.deepcopy(net), x)
    for plan in PLANS:
        model, layouts = remembered(net, plan), list[bool]()
        inner(model).blocks[2].register_forward_pre_hook(
            lambda _, args: layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))  # noqa: B023
        )
        assert_equal(step(model, x), wanted, plan)
        assert layouts
        assert all(layouts)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_random_numbers_move_once(kind: str, scheme: str) -> None:
    """As in a loop over the blocks in plain PyTorch."""
    make, shape = KINDS[kind]
    blocks, x = [make() for _ in range(DEPTH)], torch.randn(shape)
    plain = nn.ModuleList(copy.deepcopy(blocks))
    torch.manual_seed(7)
    h = x
    for block in plain:
        h = h + 0.1 * block(h)
    wanted = [torch.rand(1), *(b for name, b in plain.named_buffers() if "num_batches" in name)]
    for plan in plans_of(scheme):
        model = remembered(network(scheme, blocks), plan)
        step(model, given(scheme, x))
        torch.manual_seed(7)
        for b in model.modules():
            b.reset_running_stats() if isinstance(b, nn.modules.batchnorm._NormBase) else None
        model(given(scheme, x)).sum().backward()
        found = [torch.rand(1), *(b for name, b in model.named_buffers() if "num_batches" in name)]
        assert_equal(found, wanted, plan)


# scheme × condition ----------------------------------------------------------------------------------------------------


@dataclass
class Condition:
    """What is done around a step, and with which network."""

    run: Run
    make: Callable[[], nn.Module]
    schemes: tuple[str, ...]
    options: dict[str, Any]
    shape: tuple[int, ...] = (3, 8)
    tied: bool = False


CONDITIONS: dict[str, Condition] = {}


def condition(
    make: Callable[[], nn.Module] = Mlp, schemes: tuple[str, ...] = SCHEMES, shape: tuple[int, ...] = (3, 8), *, name: str = "",
    tied: bool = False, **options: Any,
) -> Callable[[Run], Run]:  # fmt: skip
    def register(run: Run) -> Run:
        CONDITIONS[name or run.__name__] = Condition(run, make, schemes, options, shape, tied)
        return run

    return register


def gradients(of: Tensor, model: nn.Module, *leaves: Tensor, **options: Any) -> list[Tensor | None]:
    wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(of, wanted, allow_unused=True, **options))


for _name, _gamma in (
    ("gamma=1", 1), ("gamma near 1", 1 - 1 / 50_000), ("gamma=1/8", 0.125), ("gamma=0.1", 0.1),
    ("powers of two", [0.125, 0.5, 1, 2**-7, 0.25, 2**-8, 0.125]),
    ("gamma per layer", [0.5, 0.9, 1, 0.99, 0.1, 1, 0.3]),
):  # fmt: skip
    condition(schemes=FORMS, name=_name, gamma=_gamma)(two_steps)
for _name, _velocity in (("first", "first"), ("module", nn.Linear(8, 8)), ("function", torch.sin)):
    condition(schemes=FORMS, name=f"velocity: {_name}", velocity=_velocity)(two_steps)
condition(
    schemes=FORMS, name="gamma per layer and velocity", gamma=[1, 0.3, 0.99, 0.9, 0.5, 0.2, 0.7], velocity="first"
)(two_steps)
condition(schemes=FORMS, name="random sign", gamma=SIGN)(two_steps)
condition(schemes=FORMS, name="random sign, per layer, and velocity", gamma=SIGNS, velocity="first")(two_steps)
condition(schemes=FORMS, name="random sign, v from a module", gamma=SIGN, velocity=nn.Linear(8, 8))(two_steps)
condition(schemes=FORMS, name="random sign and 16 bits", gamma=SIGN, fixed_point="int16")(two_steps)
condition(
    *KINDS["attention+dropout"][:1], FORMS, KINDS["attention+dropout"][1], name="random sign and dropout", gamma=SIGN
)(two_steps)
condition(conv, FORMS, (3, 4, 5, 5), name="random sign and convolutions", gamma=SIGNS)(two_steps)
condition(name="a range that is given", fixed_point=rg.FixedPoint(18, torch.int32))(two_steps)
condition(name="verify=off", verify="off")(two_steps)
condition(tied=True, name="one block again and again")(two_steps)


@condition()
def autocast_with_backward_inside(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    with torch.autocast("cpu", torch.bfloat16):
        return step(model, x)


@condition()
def autocast_with_backward_outside(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.requires_grad_())
    y.square().mean().backward()
    assert torch.is_autocast_cache_enabled()
    assert all(p.grad is not None for p in model.parameters())
    return [y, *left_by(model)]


condition(fixed_point="int16", name="autocast and 16 bits")(autocast_with_backward_inside)
condition(conv, FORMS, (2, 4, 5, 5), name="autocast and convolutions")(autocast_with_backward_outside)


for _frozen in ([0], [0, 1, 2], [2, 3], [6], [0, 1, 2, 3, 4, 5, 6]):
    for _leaf in (True, False):

        def frozen(model: nn.Module, x: Tensor, which: list[int] = _frozen, leaf: bool = _leaf) -> list[Tensor | None]:
            for k in which:
                inner(model).blocks[k].requires_grad_(False)
            x = x.clone().requires_grad_(leaf)
            y = model(x)
            if y.requires_grad:
                y.square().sum().backward()
            assert y.requires_grad == (leaf or len(which) < DEPTH)
            assert (x.grad is not None) == leaf
            return [y, x.grad, *left_by(model)]

        condition(name=f"frozen {_frozen}, input {'with' if _leaf else 'without'} gradient")(frozen)


@condition()
def second_order(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = model(x.requires_grad_()).square().sum()
    (once,) = torch.autograd.grad(y, x, retain_graph=True)
    (twice,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(once, twice)
    penalty = gradients(twice.square().sum(), model, x, retain_graph=True)
    y.backward()
    return [once, *penalty, *left_by(model)]


@condition()
def a_loss_on_one_element(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    y = model(x.requires_grad_())
    return gradients(y[0, 0], model, x)


@condition()
def hooks_that_look_between_blocks(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """In float32 looking changes no bit."""
    unseen = step(copy.deepcopy(model), x)
    seen: list[Tensor] = []

    def look(block: nn.Module, args: Any) -> None:
        if args[0].requires_grad and torch._C._current_graph_task_id() == -1:
            args[0].register_hook(seen.append)

    for k in (0, 2, 3, DEPTH - 1):
        inner(model).blocks[k].register_forward_pre_hook(look)
    found = step(model, x)
    assert_equal(found, unseen)
    return [*found, *seen]


@condition(schemes=FORMS)
def hooks_that_change_the_gradient(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    def halve(block: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            args[0].register_hook(lambda g: 0.5 * g)

    unhalved = step(copy.deepcopy(model), x)[1]
    inner(model).blocks[0].register_forward_pre_hook(halve)
    found = step(model, x)
    assert torch.equal(found[1], 0.5 * unhalved)  # x₀ goes nowhere else
    return found


@condition()
def evaluation_in_between(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    with torch.no_grad():
        model.eval()(3 * x)  # its range is known from here on
        before = model(3 * x)
        assert before.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(model(3 * x), before)
    pending = model.train()(x)
    with torch.no_grad():
        model.eval()(x)
    pending.square().sum().backward()
    return [before, pending, *left_by(model)]


@condition(lambda: conv(4), FORMS, (2, 4, 6, 6))
def gradients_in_another_layout(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    y, found = model(x.requires_grad_()), []
    weight = torch.linspace(-1, 1, x.numel()).view(x.shape)
    for layout in (torch.contiguous_format, torch.channels_last):
        found += torch.autograd.grad(y, x, weight.contiguous(memory_format=layout), retain_graph=True)
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()
    return found


class Scribbles(nn.Module):
    """Overwrites its input, unless told to be gentle."""

    def __init__(self, gentle: bool = False) -> None:
        super().__init__()
        self.linear, self.gentle = nn.Linear(8, 8), gentle

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x * 0.5).relu() if self.gentle else x.mul_(0.5).relu_())


MOVING = ("branch", "block", "relu", "coupling")


@condition(Scribbles, MOVING)
def blocks_that_overwrite_their_input(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    gentle = copy.deepcopy(model)
    for block in inner(gentle).blocks:
        block.gentle = True
    found = step(model, x)
    assert_equal(found, step(gentle, x))
    return found


condition(Scribbles, FORMS, name="overwritten input and velocity", velocity="first")(step)
condition(Scribbles, FORMS, name="overwritten input and 16 bits", fixed_point="int16")(step)


class Grows(nn.Module):
    """f of another size at every call that forward makes: from the usual one to a million times that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.size = Mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.size * torch.tanh(self.inner(x))


def growing(model: nn.Module, sizes: dict[int, float]) -> None:
    for k, size in sizes.items():
        inner(model).blocks[k].size = size


@condition(Grows, MOVING)
def the_range_widens_once(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    growing(model, {3: 1e6})
    return two_steps(model, x)


@condition(Grows, MOVING)
def the_range_widens_again_and_again(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    growing(model, {0: 1e3, 2: 1e5, 3: 1e8, 6: 1e11})
    loss = model(x.requires_grad_()).square().mean()
    first = gradients(loss, model, x, retain_graph=True)
    assert_equal(gradients(loss, model, x, retain_graph=True), first)  # forwards again, then back
    blocks = inner(model).blocks
    upper = torch.autograd.grad(loss, list(blocks[4].parameters()), retain_graph=True)
    return [*first, *upper, *gradients(loss, model, x)]


condition(Grows, FORMS, name="the range widens: velocity", velocity="first")(the_range_widens_once)
condition(Grows, FORMS, name="the range widens: gamma=1", gamma=1)(the_range_widens_again_and_again)
condition(Grows, FORMS, name="the range widens: gamma=1/8", gamma=0.125)(the_range_widens_again_and_again)


@condition(Grows, MOVING)
def the_range_widens_late_and_comes_back(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """In a pass whose range is known; the passes after it are as fine as before."""
    first = step(model, x)
    growing(model, {4: 1e6})
    model.zero_grad()
    wide = step(model, x)
    growing(model, {4: 1.0})
    with torch.no_grad():
        model(x)
    model.zero_grad()
    again = step(model, x)
    assert (again[0] - first[0]).norm() <= 1e-5 * first[0].norm()
    return [*first, *wide, *again]


@condition(Grows, MOVING, fixed_point="int16")
def the_range_of_16_bits_widens(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    growing(model, {1: 10.0, 3: 300.0, 5: 5e3})
    return step(model, x)


for _run in (second_order, hooks_that_look_between_blocks, hooks_that_change_the_gradient, evaluation_in_between):
    condition(schemes=FORMS, name=f"random sign: {_run.__name__}", gamma=SIGN)(_run)
for _run in (the_range_widens_once, the_range_widens_again_and_again, the_range_widens_late_and_comes_back):
    condition(Grows, FORMS, name=f"random sign: {_run.__name__}", gamma=SIGNS)(_run)
condition(Scribbles, FORMS, name="random sign and overwritten input", gamma=SIGN)(step)


@pytest.mark.parametrize(("scheme", "name"), [(s, n) for n, c in CONDITIONS.items() for s in c.schemes])
@pytest.mark.filterwarnings("ignore:the input of this pass", "ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
def test_condition(name: str, scheme: str) -> None:
    case = CONDITIONS[name]
    block = case.make()
    blocks = [block] * DEPTH if case.tied else [block, *(case.make() for _ in range(DEPTH - 1))]
    net = network(scheme, blocks, **copy.deepcopy(case.options))
    x = given(scheme, torch.randn(case.shape))
    torch.manual_seed(1)
    wanted = case.run(copy.deepcopy(net), x.clone())
    assert any(t is not None and t.any() for t in wanted)
    for plan in plans_of(scheme):
        torch.manual_seed(1)
        assert_equal(case.run(remembered(net, plan), x.clone()), wanted, plan)


# the network itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.1, 0.5, 0.9, 0.99, 0.9999, "1 - 1/(50k)", 1])
@pytest.mark.parametrize("depth", [1, 17, 62, 167, 3_000])
def test_the_inverse_at_any_gamma_and_depth(gamma: float | str, depth: int) -> None:
    g = 1 - 1 / (50 * depth) if isinstance(gamma, str) else gamma
    shared = [Mlp(4, 4) for _ in range(7)]
    if g == 1:  # v grows without damping: keep the sum of all steps within reach
        for block in shared:
            block.outer.weight.data /= depth
    net, x = rg.MomentumNet([shared[k % 7] for k in range(depth)], gamma=g), torch.randn(2, 4)
    with torch.no_grad():
        first = begun(net, x).fixed
        state = net.encode(x)
        back = net.inverse(state)
    assert not torch.equal(state.x, back)
    assert torch.equal(back, first.decode(first.encode(x), x.dtype))


@pytest.mark.parametrize("bits", [[1] * 20, [2] * 9, [3] * 17, [4] * 5, [5] * 9, [8] * 3, [3, 1, 0, 7, 8, 2, 6]])
def test_powers_of_two_keep_their_bits_and_no_more(bits: list[int]) -> None:
    """γ = 1/2^k: k bits an element and layer, to the last byte."""
    net, x = rg.MomentumNet([Mlp() for _ in bits], gamma=[Fraction(1, 2**k) for k in bits]).double(), torch.randn(3, 8)
    first = begun(net, x.double()).fixed
    state = net.encode(x.double())
    assert sum(b.nbytes for b in state.held.buffers.values()) == -(-sum(bits) // 8) * x.numel()
    assert torch.equal(net.inverse(state), first.decode(first.encode(x.double()), torch.float64))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("kind", "dtype", "fixed_point"), BLOCKS)
@pytest.mark.parametrize("scheme", SCHEMES[:-1])
def test_the_inverse_of_every_network(scheme: str, kind: str, dtype: torch.dtype, fixed_point: str, grad: bool) -> None:
    make, shape = KINDS[kind]
    velocity = {} if scheme == "coupling" else {"velocity": "first"}
    net = network(scheme, [make() for _ in range(DEPTH)], fixed_point=fixed_point, **velocity).to(dtype).eval()
    x = given(scheme, torch.randn(shape)).to(dtype)
    with torch.set_grad_enabled(grad):
        for _ in range(2):  # with a range that widens, and a known one
            first = begun(net, x).fixed
            state = net.encode(x)
            assert torch.equal(net.inverse(state), first.decode(first.encode(x), dtype))


@pytest.mark.filterwarnings("ignore:the input of this pass")
@pytest.mark.parametrize("scheme", MOVING)
def test_the_inverse_through_a_range_that_widens(scheme: str) -> None:
    net, x = network(scheme, [Grows() for _ in range(DEPTH)]), given(scheme, torch.randn(3, 8))
    growing(net, {0: 1e3, 2: 1e5, 3: 1e8, 6: 1e11})
    first = begun(net, x).fixed
    state = net.encode(x)
    assert first.bits > state.fixed.bits + 30
    assert torch.equal(net.inverse(state), first.decode(first.encode(x), x.dtype))


def test_the_inverse_takes_the_same_kernels_and_moves_no_statistics() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval() for _ in range(2)]
    net, x = rg.MomentumNet(layers, form="block"), torch.randn(2, 5, 8)
    net.inverse(net.encode(x))  # fused kernels are taken without gradients only
    with torch.no_grad():
        state = net.encode(x)
    net.inverse(state)
    norms = rg.MomentumNet([nn.BatchNorm1d(8) for _ in range(3)])
    norms.inverse(norms.encode(torch.randn(16, 8)))
    assert [int(b.num_batches_tracked) for b in norms.blocks] == [1, 1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_a_state_carries_gradients_of_x_and_v(form: str) -> None:
    net = network(form, [Mlp() for _ in range(DEPTH)], velocity="first").double()
    leaf = torch.randn(3, 8).double().requires_grad_()
    state = net.encode(leaf)
    found = gradients(state.x.sum() + (3 * state.v).square().sum(), net, leaf)
    z, v = leaf, None
    for block in [net.blocks[0], *net.blocks]:
        y = block(z)
        f = {"branch": y, "block": y - z, "relu": torch.relu(z + y) - z}[form]
        if v is None:
            v = f
            continue
        v = 0.9 * v + 0.1 * f
        z = z + v
    wanted = gradients(z.sum() + (3 * v).square().sum(), net, leaf)
    assert all((a - b).norm() <= 1e-9 * b.norm() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("form", FORMS)
def test_within_1e_5_of_a_float64_recurrence(form: str, memory: str) -> None:
    """γ = 0.9, depth 100, unit-scale data."""
    blocks = [Mlp(32, 32) for _ in range(100)]
    x = torch.randn(32, 32, requires_grad=True)
    net = rg.MomentumNet(blocks, gamma=0.9, form=form, memory=memory)
    y = net(x)
    ours = [y.detach(), *gradients(y.square().mean(), net, x)]
    exact = rg.MomentumNet(copy.deepcopy(blocks), gamma=0.9).double()
    x64 = x.detach().double().requires_grad_()
    y64 = float_recurrence(exact.blocks, Fraction(9, 10), x64, form)
    truth = [y64.detach(), *gradients(y64.square().mean(), exact, x64)]
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True)]
    assert max(errors) < 1e-5, f"output {errors[0]:.1e}, input {errors[1]:.1e}, worst parameter {max(errors[2:]):.1e}"


@pytest.mark.parametrize("plan", ["store", *PLANS])
@pytest.mark.parametrize("scheme", MOVING)
def test_gradients_in_float64_are_those_of_finite_differences(scheme: str, plan: Plan) -> None:
    velocity = {} if scheme == "coupling" else {"velocity": "first"}
    model = remembered(network(scheme, [Mlp(3, 4) for _ in range(DEPTH)], **velocity), plan).double()
    x = given(scheme, torch.randn(2, 3, dtype=torch.float64)).requires_grad_()
    for _ in range(2):
        model(x)  # so that the range is the same at every evaluation
    assert torch.autograd.gradcheck(model, (x,), eps=1e-6, atol=1e-6, check_batched_grad=True)
    if plan in ("store", "reverse"):
        assert torch.autograd.gradgradcheck(model, (x,), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", ["store", "checkpoint", "auto"])
def test_gamma_zero_is_the_plain_network(form: str, memory: str) -> None:
    blocks, x = [conv() for _ in range(5)], torch.randn(2, 4, 5, 5, requires_grad=True)
    for block in blocks:
        block[2].inplace = False
    net, leaf = rg.MomentumNet(blocks, gamma=0, form=form, memory=memory).eval(), x.detach().clone().requires_grad_()
    y = leaf
    for block in blocks:
        y = block(y) if form == "block" else torch.relu(y + block(y)) if form == "relu" else y + block(y)
    y.square().mean().backward()
    out = net(x)
    out.square().mean().backward()
    assert torch.equal(out, y)
    assert torch.equal(x.grad, leaf.grad)


# form "relu" is form "block" with the addition and the relu in the blocks ------------------------------------------------


def pair(branches: list[nn.Module], **options: Any) -> list[Any]:
    return [
        network("relu", copy.deepcopy(branches), **options),
        network("block", [Whole(b) for b in branches], **options),
    ]


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize(
    "gamma", [[0.9], [0.5, 0.9], [1, 0.3, 0.99], [0.9, 0.99, 1], [0.5, 0], [0, 0.5], [0.9, 0, 0], [0.9] * 9]
)
def test_the_relu_form_is_the_network_whose_blocks_add_and_rectify(gamma: list[float], velocity: str | None) -> None:
    x = torch.randn(3, 8).double()
    for memory in ("store", "checkpoint", *(["reverse"] if all(gamma) else [])):
        nets = [net.double() for net in pair([Mlp() for _ in gamma], gamma=gamma, velocity=velocity, memory=memory)]
        (y, *ours), (z, *theirs) = (step(net, x) for net in nets)
        assert torch.equal(y, z)
        assert all((a - b).norm() <= 1e-12 * b.norm() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_outputs_have_the_same_bits_in_every_dtype(dtype: torch.dtype, amp: bool) -> None:
    """Under autocast the sum is rounded as by an addition in place."""
    relu, block = (net.to(dtype) for net in pair([conv(8) for _ in range(8)]))
    x = torch.randn(3, 8, 5, 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp and dtype == torch.float32):
        assert torch.equal(relu(x), block(x))


@pytest.mark.parametrize("whole", [set(), {0}, {1}, {2}, {0, 1}])
def test_steps_of_both_forms_in_one_pass(whole: set[int]) -> None:
    """`step(form=...)` says what a block computes where the others compute something else."""
    from retrograde.reverse.extra import Extra
    from retrograde.reverse.forward import Pass
    from retrograde.reverse.momentum import Momentum

    branches, x, found = [conv(4).double() for _ in range(3)], torch.randn(2, 4, 3, 5, dtype=torch.float64), []
    for form in ("block", "relu"):
        net = rg.MomentumNet([nn.Identity()] * 3, form=form, fixed_point=rg.FixedPoint(40, torch.int64))
        leaf = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        seen = net.range.begin(leaf, 4, training=True, overflow="raise")
        run = Pass(Momentum(leaf, net.recurrence, seen, reversible=False), leaf, 3)
        for k, f in enumerate(branches):
            is_whole = form == "block" or k in whole
            run.step(Whole(f) if is_whole else f, Extra((), {}), form="block" if is_whole else None)
        found.append(torch.autograd.grad(run.finish().square().mean(), [leaf, *nn.ModuleList(branches).parameters()]))
    assert all((a - b).norm() <= 1e-12 * b.norm() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gamma", [0.9, 0.999])
def test_small_gradients_of_float16_are_not_lost(form: str, gamma: float) -> None:
    """What is carried is (1 − γ) times a gradient, which float16 would round to 0."""
    f, start = [nn.Linear(16, 16).half() for _ in range(4)], torch.randn(8, 16).half()
    x, exact = start.clone().requires_grad_(), start.double().requires_grad_()
    y = rg.MomentumNet(f, gamma, form=form)(x)
    y.backward(torch.full_like(y, 1e-5))
    z, v = exact, torch.zeros_like(exact)
    for linear in f:
        u = F.linear(z, linear.weight.double(), linear.bias.double())
        v = gamma * v + (1 - gamma) * {"branch": u, "block": u - z, "relu": (z + u).relu() - z}[form]
        z = z + v
    z.backward(torch.full_like(z, 1e-5))
    assert (x.grad.double() - exact.grad).norm() <= 0.02 * exact.grad.norm()


def test_16_bit_state_is_no_coarser_than_the_dtype_it_is_for() -> None:
    """Depth 30 in bfloat16: the error against float32 is within twice that of 32-bit state."""
    blocks, x, errors = [conv(16) for _ in range(30)], torch.randn(4, 16, 8, 8), {}
    with torch.no_grad():
        wanted = rg.MomentumNet(blocks, gamma=0.9)(x)
        for fixed_point in ("auto", "int16"):
            net = rg.MomentumNet(copy.deepcopy(blocks), gamma=0.9, fixed_point=fixed_point).bfloat16()
            errors[fixed_point] = float((net(x.bfloat16()).float() - wanted).norm() / wanted.norm())
    assert errors["int16"] < 2 * errors["auto"] < 0.05


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "x", [torch.ones(0, 8), torch.ones(8), torch.ones(4, 3, 8).transpose(0, 1), torch.ones(1, 8).expand(5, 8)]
)
def test_inputs_of_odd_shapes_and_layouts(x: Tensor, plan: Plan) -> None:
    for form in FORMS:
        net = network(form, [Mlp()] * DEPTH)
        assert_equal(step(remembered(net, plan), x), step(net, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gamma", "depth"),
    [*((kind, 0.9, 150) for kind in BASIC), *(("mlp", gamma, 1_000) for gamma in (0.5, 0.9, 1 - 1 / 50_000))],
)
def test_deep_networks(kind: str, gamma: float, depth: int) -> None:
    """What a block is and what gamma is have nothing to do with each other: every kind, and every gamma, once."""
    make, shape = KINDS[kind]
    net, x = network("branch", [make() for _ in range(depth)], gamma=gamma), torch.randn(shape)
    wanted = step(copy.deepcopy(net), x)
    for plan in ("reverse", "checkpoint"):
        assert_equal(step(remembered(net, plan), x), wanted, plan)
