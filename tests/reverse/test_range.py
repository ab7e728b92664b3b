"""The range of the fixed point: wide enough for whatever comes, and as fine as it can be."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import retrograde as rg
from problems import Mlp, float_recurrence
from retrograde.arithmetic.fixed import FixedPoint
from retrograde.reverse.calibrate import HEADROOM, MOST_BITS, calibrated, followed
from retrograde.reverse.deferred import Deferred
from retrograde.reverse.extra import Extra
from retrograde.reverse.forward import Pass
from retrograde.reverse.momentum import Momentum
from retrograde.reverse.widening import shifted, unshifted
from ways import Event, assert_equal, begun

COARSE = pytest.mark.filterwarnings("ignore:the input of this pass")
"""It does not matter here: f is of one size, whatever x is."""


# how a range is chosen -------------------------------------------------------------------------------------------------


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_calibration_leaves_the_headroom(x: float, v: float) -> None:
    for dtype in (torch.int32, torch.int64):
        fixed = calibrated(x, v, dtype)
        free_x = fixed.limit / (x * 2.0**fixed.bits)
        free_v = fixed.limit / (v * 2.0 ** (fixed.bits + fixed.guard))
        assert min(free_x, free_v) >= 2**HEADROOM
        assert min(free_x, free_v) <= 2 ** (HEADROOM + 1)
        assert 0 <= fixed.guard <= 20


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_no_scale_is_beyond_float32(dtype: torch.dtype) -> None:
    for x, v in ((0.0, 0.0), (1e-300, 0.0), *((2.0**e, 2.0 ** (e - 30)) for e in (-300, -126, -90, -40, 0, 40))):
        fixed = calibrated(x, v, dtype, most_guard=20)
        assert fixed.bits <= MOST_BITS
        assert math.isfinite(torch.tensor(2.0 ** (fixed.bits + fixed.guard), dtype=torch.float32).item())


def test_the_range_follows_the_activations() -> None:
    fixed = calibrated(1.0, 0.1, torch.int32)
    largest = fixed.limit * 2.0**-fixed.bits
    assert followed(fixed, 1.0, 0.1) is fixed
    assert followed(fixed, largest / 3, 0.1) is fixed
    wider = followed(fixed, largest / 1.5, 0.1)
    assert wider.limit * 2.0**-wider.bits >= 4 * largest / 1.5
    assert followed(fixed, largest / 1000, 0.0001).bits > fixed.bits
    assert followed(fixed, 1.0, 1.0).guard < fixed.guard


@given(st.sampled_from([torch.int16, torch.int32, torch.int64]), st.data())
def test_a_shift_can_be_undone(dtype: torch.dtype, data: st.DataObject) -> None:
    limit = 2 ** (8 * dtype.itemsize - 2)
    q = torch.tensor(data.draw(st.lists(st.integers(-2 * limit, 2 * limit - 1), min_size=1, max_size=9)), dtype=dtype)
    by = data.draw(st.integers(0, 8 * dtype.itemsize + 9))
    if q.abs().max() > limit or (q == torch.iinfo(dtype).min).any():
        q = q >> 2  # values in range
    high, rest = shifted(q.clone(), by)
    assert torch.equal(unshifted(high, rest, by), q)
    assert high.dtype == dtype
    exact = [Fraction(int(a), 2**by) for a in q]
    assert all(
        abs(int(b) - a) <= Fraction(1, 2) or by >= 8 * dtype.itemsize - 2 for a, b in zip(exact, high, strict=True)
    )


# what comes ------------------------------------------------------------------------------------------------------------


class Times(nn.Module):
    """x + f(x), with f of one size, whatever x is."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.w, self.size = nn.Linear(4, 4), size

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size * torch.tanh(self.w(x))


def times(size: float, dtype: torch.dtype, **settings: Any) -> tuple[rg.MomentumNet, nn.ModuleList]:
    torch.manual_seed(0)
    plain = nn.ModuleList(Times(size) for _ in range(4)).to(dtype)
    return rg.MomentumNet(copy.deepcopy(plain), form="block", **settings), plain.double()


def wanted_of(plain: nn.ModuleList, x: Tensor) -> Tensor:
    return float_recurrence(plain, Fraction(9, 10), x.double(), "block").detach()


def assert_close(y: Tensor, wanted: Tensor, close: float) -> None:
    assert (y.double() - wanted).abs().max() <= close * wanted.abs().max()


@COARSE
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("overflow", ["raise", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e12, 1e20])
def test_what_is_far_larger_than_the_input_is_held_at_once(
    size: float, dtype: torch.dtype, overflow: str, training: bool
) -> None:
    """In units of a range made for |x| = 1e-15, it is beyond float32, in which the largest values are written down."""
    net, plain = times(size, dtype, overflow=overflow)
    x = 1e-15 * torch.randn(3, 4, dtype=dtype)
    for _ in range(3):
        y = net.train(training)(x)
        assert_close(y.detach(), wanted_of(plain, x), 1e-5)
    y.sum().backward()


@COARSE
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("scale", [40.0, 4e3, 4e6, 1e-6, 1e9])
def test_training_goes_on_where_inputs_outgrow_the_range(scale: float, memory: str) -> None:
    torch.manual_seed(0)
    net, plain = rg.MomentumNet([Mlp() for _ in range(6)], memory=memory).double(), None
    plain, x = copy.deepcopy(net.blocks), torch.randn(3, 8, dtype=torch.float64)
    net(x).square().sum().backward()
    net.zero_grad()
    y, wanted = net(scale * x), float_recurrence(plain, Fraction(9, 10), scale * x)
    assert_close(y.detach(), wanted.detach(), 1e-9)
    y.square().sum().backward()
    wanted.square().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-7 * q.grad.norm()


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_pass_is_as_good_as_any(dtype: torch.dtype, converted: bool) -> None:
    net, plain = times(1.0, dtype)
    model = rg.convert(nn.Sequential(*net.blocks), gamma=0.9, stages=[""]) if converted else net
    x = 50 * torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    with torch.no_grad():
        for _ in range(2):
            assert_close(model.eval()(x), wanted_of(plain, x), {torch.float32: 1e-6, torch.float64: 1e-10}[dtype])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["input", "block", "velocity"])
def test_what_is_not_finite_is_refused_by_name_and_costs_later_passes_nothing(where: str, bad: float) -> None:
    blow = {"by": 0.0}
    launch = (lambda x: x + blow["by"]) if where == "velocity" else None
    net, plain = times(1.0, torch.float64, velocity=launch)
    x, says = (
        torch.randn(3, 4, dtype=torch.float64),
        {"input": "in the input", "block": "out of block 2", "velocity": "in the initial velocity"},
    )
    for known in (False, True):
        for training in (True, False):
            net.train(training)
            if known:
                net(x)
            z = x.clone()
            if where == "input":
                z[1, 3] = bad
            elif where == "block":
                net.blocks[2].size = bad
            else:
                blow["by"] = bad
            for _ in range(2):
                with pytest.raises(rg.RangeOverflow, match=f"NaN or Inf {says[where]}"):
                    net(z)
            net.blocks[2].size, blow["by"] = 1.0, 0.0
            if where != "velocity":
                assert_close(net(x).detach(), wanted_of(plain, x), 1e-9)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_overflow_as_nan_for_loops_that_scale_their_loss(bad: float, memory: str) -> None:
    net, _ = times(1.0, torch.float32, overflow="nan", memory=memory)
    x = torch.randn(3, 4)
    net(x)
    net.blocks[2].size = bad
    y = net(x)
    assert y.isnan().all()
    y.sum().backward()
    assert all(p.grad.isnan().any() for p in net.blocks[1].parameters())
    net.blocks[2].size = 1.0
    net.zero_grad()
    net(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    state = rg.MomentumNet(
        net.blocks, fixed_point=FixedPoint(20, torch.int32), overflow="nan", memory="reverse"
    ).encode(x * 1e5)
    assert state.x.isnan().all()
    assert state.v.isnan().all()


def test_a_range_that_was_given_is_not_widened() -> None:
    net, x = times(1.0, torch.float32, fixed_point=FixedPoint(20, torch.int32))[0], torch.randn(3, 4)
    net(x)
    net.blocks[1].size = 1e6
    with pytest.raises(rg.RangeOverflow, match=r"\|v\| = .* out of block 1 is beyond .*20 fraction bits"):
        net(x)
    with pytest.raises(rg.RangeOverflow, match=r"\|x\| = .* in the input is beyond"):
        net(torch.full((1, 4), 5e4))
    assert net.fixed_point == FixedPoint(20, torch.int32)


@pytest.mark.parametrize("fixed_point", ["auto", FixedPoint(12, torch.int32)])
def test_half_precision_does_not_decode_to_infinity(fixed_point: Any) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, 3e4)

    with pytest.raises(rg.RangeOverflow, match=r"beyond 6\.55e\+04"):
        rg.MomentumNet([Constant(), nn.Tanh()], gamma=1, fixed_point=fixed_point)(torch.full((1, 2), 4e4).half())


SMALLEST = {torch.float32: -25, torch.bfloat16: -25, torch.float64: -17}
"""The power of ten from which on values are refused: 107 fraction bits are the most. The largest underflows in float32 at 45."""
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}
POWERS = [-36, -28, -24, -17, -12, -10, -7, 12, 30]
FARTHER = [-300, -200, -60, -46, -45, 39, 100, 300]


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize(
    ("dtype", "power"), [*((d, p) for d in CLOSE for p in POWERS), *((torch.float64, p) for p in FARTHER)]
)
def test_any_magnitude_is_held_as_well_or_refused(dtype: torch.dtype, power: int, velocity: str | None) -> None:
    """Never taken for zero without a word."""
    blocks = [nn.Linear(5, 5, bias=False).to(dtype) for _ in range(6)]
    net = rg.MomentumNet(blocks, memory="reverse", velocity=velocity)
    x = (10.0**power * torch.randn(3, 5).double()).to(dtype).requires_grad_()
    if power < SMALLEST[dtype]:
        for _ in range(2):
            with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
                net(x)
        return
    y = net(x)
    if velocity is None:
        exact = [copy.deepcopy(b).double() for b in blocks]
        assert_close(y.detach(), float_recurrence(exact, Fraction(9, 10), x.double()).detach(), CLOSE[dtype])
    (y / 10.0**power).sum().backward()
    assert x.grad.isfinite().all()


@COARSE
@pytest.mark.parametrize("size", [1e39, 1e60])
def test_blocks_of_float64_may_grow_beyond_float32(size: float) -> None:
    net, plain = times(size, torch.float64, memory="reverse")
    x = torch.randn(3, 4, dtype=torch.float64)
    y = net(x)
    assert_close(y.detach(), wanted_of(plain, x), 1e-9)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_and_nothing_are_not_small(dtype: torch.dtype) -> None:
    net, x = rg.MomentumNet([nn.Linear(5, 5, bias=False) for _ in range(3)]).to(dtype), torch.randn(3, 5, dtype=dtype)
    for k in range(6):
        net.train(k % 2 == 0)
        assert not net(torch.zeros_like(x)).any()
        assert net(x).any()
        assert net(x[:0]).shape == (0, 5)


# the range over many passes --------------------------------------------------------------------------------------------


@COARSE
def test_it_follows_drifting_scales_and_jumps() -> None:
    block, bits = nn.Linear(4, 4, bias=False), []
    net, x = rg.MomentumNet([block] * 8, memory="reverse"), torch.randn(2, 4)
    for scale in torch.logspace(0, 4, 40).tolist() + torch.logspace(4, -3, 40).tolist():
        net(x * scale).sum().backward()
        bits.append(net.fixed_point.bits)
    assert min(bits) <= bits[0] - 10
    assert bits[-1] >= bits[0] + 5
    for scale in (0.0, 1.0, 1e4, 1e-6, 1e6):
        net(x * scale).sum().backward()


def test_branches_that_start_at_zero() -> None:
    """The last layer of each branch is zero at first, as in many recipes: v grows from nothing."""
    blocks = [Mlp(8, 16) for _ in range(12)]
    for block in blocks:
        nn.init.zeros_(block.outer.weight)
    net = rg.MomentumNet(blocks, memory="reverse")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    x, target = torch.randn(64, 8), torch.randn(64, 8)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), target).backward()
        optimizer.step()


@pytest.mark.parametrize("scale", [1e5, 1e6, 1e9])
def test_a_pass_after_one_out_of_all_proportion_is_coarse_once_and_says_so(scale: float) -> None:
    net, x = rg.MomentumNet([nn.Linear(5, 5, bias=False) for _ in range(6)]), torch.randn(3, 5)
    net(x)
    wanted = net(x)
    net(scale * x)
    with pytest.warns(UserWarning, match=r"held to \d+ binary digits"):
        net(x)
    torch.testing.assert_close(net(x), wanted, rtol=1e-6, atol=1e-6)


def test_an_input_that_is_nothing_beside_its_activations_is_told() -> None:
    net = rg.MomentumNet([nn.Linear(4, 4, bias=False) for _ in range(3)], gamma=0.5)
    for block in net.blocks:
        nn.init.eye_(block.weight).data.mul_(1e12)
    net(torch.ones(4))
    with pytest.warns(UserWarning, match="held to 0 binary digits"):
        net(torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_networks_have_is_not_called_coarse(dtype: torch.dtype) -> None:
    """Activations a thousand times the input, as of language models; warnings are errors here."""
    net = rg.MomentumNet([nn.Linear(4, 4, bias=False) for _ in range(6)], gamma=0.5).to(dtype)
    for block in net.blocks:
        nn.init.eye_(block.weight).data.mul_(7.0)
    for _ in range(3):
        assert net(torch.full((2, 4), 0.1, dtype=dtype)).max() > 100


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-27), (torch.float64, 1e-20), (torch.bfloat16, 1e-27)])
def test_activations_that_shrink_are_refused_where_the_first_batch_would_have_been(
    dtype: torch.dtype, least: float, training: bool
) -> None:
    net = rg.MomentumNet([nn.Linear(5, 5, bias=False) for _ in range(6)]).to(dtype).train(training)
    x, scale = torch.randn(3, 5).to(dtype), 1.0
    while scale > 2e3 * least:
        net(x * scale)
        scale /= 30
    before = net.fixed_point
    for _ in range(2):
        with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
            net(x * least)
        assert net.fixed_point == before
    net(x * scale)


@pytest.mark.parametrize("converted", [True, False])
def test_evaluation_goes_with_training_and_each_has_its_range(converted: bool) -> None:
    net, plain = times(1.0, torch.float32)
    blocks, x = list(net.blocks), torch.randn(16, 4)
    model = rg.convert(nn.Sequential(*blocks), gamma=0.9, stages=[""]) if converted else net
    with torch.no_grad():
        model.eval()(x)
    for k in range(60):
        model.train()(x).square().mean().backward()
        for block in blocks:
            block.size = 1.08**k  # training leaves the range of evaluation behind
    with torch.no_grad():
        assert model.eval()(x).isfinite().all()
        for block in blocks:
            block.size = 1.0
        for scale in (1.0, 1e4, 1.0):  # a spike in training costs evaluation few digits
            model.train()(scale * x)
            for _ in range(2):
                assert_close(model.eval()(x), wanted_of(plain, x), 3e-6)


# where values are known later ------------------------------------------------------------------------------------------


def later(net: rg.MomentumNet, x: Tensor) -> Tensor:
    """A pass as on an accelerator, which is not waited for, from the second on."""
    net.range.deferred.event_on = lambda device: Event()
    known = bool(net.range.found)
    if known:
        net.range.deferred.collect(x)
        seen = net.range.begin(
            torch.ones(1, dtype=x.dtype),
            5,
            training=net.training,
            overflow=net.overflow,
            most_guard=net.recurrence.most_guard,
        )
        seen.looks, seen.dtype = False, x.dtype
    else:
        seen = begun(net, x)
    run = Pass(Momentum(x, net.recurrence, seen, reversible=False), x, len(net.blocks))
    for block in net.blocks:
        run.step(block, Extra((), {}))
    net.range.learn(run.state.range)
    return run.finish()


@COARSE
@pytest.mark.parametrize("overflow", ["raise", "nan"])
@pytest.mark.parametrize("settled", [True, False])
def test_an_overflow_is_nan_at_once_and_told_later_and_the_next_pass_is_right(settled: bool, overflow: str) -> None:
    net, plain = times(1.0, torch.float32, overflow=overflow)
    x = 1e-15 * torch.randn(3, 4)  # f does not depend on it
    for _ in range(3):
        assert_close(later(net, x).detach(), wanted_of(plain, x), 1e-6)
    for block in (*net.blocks, *plain):
        block.size = 1e9
    assert later(net, x).isnan().all()
    if overflow == "raise":
        with pytest.raises(rg.RangeOverflow, match="beyond"):
            rg.settle(net) if settled else later(net, x)
    else:
        rg.settle(net)
    for _ in range(3):
        assert_close(later(net, x).detach(), wanted_of(plain, x), 1e-5)
    rg.settle(net)


def test_that_activations_shrank_is_told_later_too() -> None:
    net, x = rg.MomentumNet([nn.Linear(5, 5, bias=False) for _ in range(4)]), torch.randn(3, 5)
    first = later(net, x)
    later(net, x * 1e-27)
    with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
        rg.settle(net)
    torch.testing.assert_close(later(net, x), first, rtol=1e-6, atol=1e-6)


def test_a_steady_network_keeps_its_range_however_often_it_is_looked_at() -> None:
    net, x = rg.MomentumNet([Mlp() for _ in range(4)]), torch.randn(3, 8)
    for _ in range(2):
        later(net, x)
        rg.settle(net)
    fixed = net.fixed_point
    for _ in range(4):
        later(net, x)
        rg.settle(net)
        assert net.fixed_point == fixed


def test_the_way_of_looking_changes_no_bit() -> None:
    net, x = rg.MomentumNet([Mlp() for _ in range(4)]), torch.randn(3, 8)
    for _ in range(3):
        net(x)
    other = copy.deepcopy(net)
    assert type(other.range.deferred) is Deferred
    assert_equal([later(other, x)], [net(x)])
