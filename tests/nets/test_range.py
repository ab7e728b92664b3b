"""The fixed-point range where little is known of the activations: first passes, jumps, very small values; and a survey's traces."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.convert.convert import stages_of
from retrograde.stack import later
from retrograde.stack.calibrate import Range, apart
from retrograde.stack.headroom import MOST_BITS, calibrated
from retrograde.stack.momentum import Momentum

GAMMA = 0.9


def encoder(dtype: torch.dtype) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(dtype)


def written_out(model: nn.TransformerEncoder, x: Tensor) -> Tensor:
    v = torch.zeros_like(x)
    for layer in model.layers:
        v = GAMMA * v + (1 - GAMMA) * (layer(x) - x)
        x = x + v
    return x


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_the_first_evaluation_of_a_converted_model_is_as_good_as_any(dtype: torch.dtype, close: float) -> None:
    model, x = encoder(dtype).eval(), 50 * torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)
    wanted = written_out(copy.deepcopy(model).double(), x)
    rg.convert(model, gamma=GAMMA)
    with torch.no_grad():
        for _ in range(2):
            y = model(x.to(dtype))
            assert (y.double() - wanted).abs().max() <= close * wanted.abs().max()


@pytest.mark.parametrize("scale", [40.0, 4e3, 4e6])
def test_training_on_inputs_that_outgrow_the_range(scale: float) -> None:
    model = encoder(torch.float64)
    plain = copy.deepcopy(model)
    rg.convert(model, gamma=GAMMA, memory="reverse")
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    model.zero_grad()
    y, wanted = model(scale * x), written_out(plain, scale * x)
    torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-9 * scale)
    y.square().sum().backward()
    wanted.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        size = float(q.grad.abs().max())
        assert (p.grad - q.grad).abs().max() <= 1e-8 * size + 1e-12, name


def test_a_pass_of_which_nothing_is_known_may_grow_without_end_once_it_was_seen_to() -> None:
    """2^30 times the input does not fit; the pass after that takes a wider range, not the same again."""

    class Grow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + 2.0**38 * torch.tanh(self.w(x))

    model = nn.Sequential(*(Grow() for _ in range(5))).double()
    rg.convert(model, gamma=GAMMA, stages=[""])
    (stage,) = stages_of(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(3):
            try:
                y = model(x)
                break
            except rg.RangeOverflow:
                continue
        else:
            pytest.fail("the range never grew")
    assert y.abs().max() > 2.0**36
    assert stage.range.fraction == 32  # again, now that something is known


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_batches_that_are_not_finite_cost_later_ones_no_precision(bad: float) -> None:
    model = encoder(torch.float64)
    plain = copy.deepcopy(model)
    rg.convert(model, gamma=GAMMA)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(4):
            with pytest.raises(rg.RangeOverflow, match="NaN or Inf"):
                model(torch.full_like(x, bad))
        torch.testing.assert_close(model(x), written_out(plain, x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(50 * x), written_out(plain, 50 * x), rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("power", [10, 17, 24, 28, 36])
def test_very_small_activations_are_held_as_well_or_refused(dtype: torch.dtype, power: int) -> None:
    torch.manual_seed(0)
    blocks = [nn.Linear(5, 5, bias=False).to(dtype) for _ in range(6)]
    net = rg.MomentumNet(blocks, GAMMA)
    x = (10.0**-power * torch.randn(3, 5)).to(dtype)
    if power > (17 if dtype == torch.float64 else 25):
        with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
            net(x)
        return
    y = net(x)
    doubles = [copy.deepcopy(block).double() for block in blocks]
    wanted, v = x.double(), torch.zeros(3, 5, dtype=torch.float64)
    for block in doubles:
        v = GAMMA * v + (1 - GAMMA) * block(wanted)
        wanted = wanted + v
    close = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}[dtype]
    assert (y.double() - wanted).abs().max() <= close * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e12, 1e30])
@pytest.mark.parametrize("velocity", [None, "first"])
def test_very_large_activations_are_held_too(dtype: torch.dtype, scale: float, velocity: str | None) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).to(dtype) for _ in range(6)]
    x = (scale * torch.randn(3, 5)).to(dtype)
    y = rg.MomentumNet(blocks, GAMMA, velocity=velocity)(x)
    torch.testing.assert_close(y, x, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)  # f is nothing beside it


def test_zeros_are_not_small() -> None:
    net = rg.MomentumNet([nn.Linear(5, 5, bias=False) for _ in range(3)], GAMMA)
    assert not net(torch.zeros(2, 5)).any()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_no_scale_is_beyond_float32(dtype: torch.dtype) -> None:
    for exponent in (-300, -126, -90, -40, 0, 40):
        fixed = calibrated(2.0**exponent, 2.0 ** (exponent - 30), dtype, most_guard=20)
        assert fixed.bits <= MOST_BITS
        assert math.isfinite(torch.tensor(2.0 ** (fixed.bits + fixed.guard), dtype=torch.float32).item())


class Notes(nn.Module):
    """Adds to a list that it is given, and reads what the others wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, notes: list[Tensor], more: dict[str, Any]) -> Tensor:
        notes.append(x.detach())
        more.setdefault("seen", []).append(len(notes))
        return torch.tanh(self.linear(x)) * len(notes)


@pytest.mark.parametrize("kind", [list, deque, partial(defaultdict, list), OrderedDict, dict])
def test_a_survey_has_containers_of_its_own(kind: Callable[[], Any]) -> None:
    given = kind()
    own = apart({"deep": ([given], 1)})["deep"][0][0]
    assert type(own) is type(given)
    own.append(1) if hasattr(own, "append") else own.update({1: 2})
    assert not given


def test_a_survey_adds_to_no_list_of_the_caller_s() -> None:
    torch.manual_seed(0)
    net = rg.MomentumNet([Notes() for _ in range(4)], GAMMA, memory="store")
    x, outputs = torch.randn(2, 4), []
    for _ in range(2):
        notes: list[Tensor] = []
        more: dict[str, Any] = {"seen": []}
        outputs.append(net(x, notes, more))
        assert len(notes) == 4
        assert more["seen"] == [1, 2, 3, 4]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)


def test_a_survey_of_a_converted_model_adds_to_no_list_either() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4))

        def forward(self, x: Tensor, notes: list[Tensor]) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                notes.append(x.detach())
            return x

    model, notes = Model(), list[Tensor]()
    rg.convert(model, stages=["layers"])
    model(torch.randn(2, 3, 8), notes).sum().backward()
    assert len(notes) == 4


class Times(nn.Module):
    """f(x) of one size, whatever x is."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.w, self.size = nn.Linear(4, 4), size

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size * torch.tanh(self.w(x))


def times(size: float, dtype: torch.dtype, **settings: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A converted model of such blocks, and a plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Times(size) for _ in range(4))).to(dtype).eval()
    return rg.convert(copy.deepcopy(plain), gamma=GAMMA, stages=[""], **settings), plain.double()


def recurrence(plain: nn.Sequential, x: Tensor) -> Tensor:
    x, v = x.double(), torch.zeros_like(x, dtype=torch.float64)
    for block in plain:
        v = GAMMA * v + (1 - GAMMA) * (block(x) - x)
        x = x + v
    return x


def good_from(run: Callable[[], Tensor], wanted: Tensor) -> int:
    """Which pass is the first that gives what is wanted; all after it must, and those before it NaN or an error."""
    good = list[bool]()
    for _ in range(6):
        try:
            y = run().double()
        except rg.RangeOverflow:
            good.append(False)
            continue
        good.append(not y.isnan().all())
        assert y.isnan().all() or (y - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert good == sorted(good)
    return good.index(True)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are known later, as those of a device that is not waited for."""

    class Event:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    def seen(self: Range, state: Momentum) -> None:
        self.later.tell(state.watch, partial(self._judge, state.outcome()))

    monkeypatch.setattr(later, "event_on", lambda device: Event())
    monkeypatch.setattr(Momentum, "eager", property(lambda self: False, lambda self, value: None), raising=False)
    monkeypatch.setattr(Range, "seen", seen)
    monkeypatch.setattr(Range, "_outgrown", lambda self, x, fixed: 0)


COARSE = pytest.mark.filterwarnings("ignore:the input of this pass")
"""It does not matter here: f is of one size, whatever x is."""


@COARSE
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("overflow", ["raise", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e12, 1e20])
def test_what_is_far_larger_than_the_input_is_no_infinity(
    size: float, dtype: torch.dtype, overflow: str, training: bool
) -> None:
    """In units of a range made for |x| = 1e-15, it is beyond float32, in which the largest values are written down."""
    model, plain = times(size, dtype, overflow=overflow)
    x = 1e-15 * torch.randn(3, 4, dtype=dtype)
    model.train(training)
    with torch.no_grad():
        wanted = recurrence(plain, x)
        assert good_from(lambda: model(x), wanted) <= 1


@COARSE
@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("overflow", ["raise", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e9, 1e12, 1e20])
def test_the_same_where_it_is_known_later(size: float, dtype: torch.dtype, overflow: str) -> None:
    model, plain = times(size, dtype, overflow=overflow)
    x = 1e-15 * torch.randn(3, 4, dtype=dtype)
    with torch.no_grad():
        assert good_from(lambda: model(x), recurrence(plain, x)) <= 2


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e10, 1e30])
def test_one_bad_batch_costs_the_next_one_no_precision(bad: float) -> None:
    model, plain = times(1.0, torch.float32)
    x = torch.randn(3, 4)
    wanted = recurrence(plain, x)
    with torch.no_grad():
        for _ in range(1 if math.isfinite(bad) else 3):  # the range of the second would be known
            model[2].size = bad
            with pytest.raises(rg.RangeOverflow):
                model(x)
            model[2].size = 1.0
        for _ in range(2):
            assert (model(x).double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@COARSE
def test_a_pass_in_floats_does_not_go_on_with_gradients() -> None:
    model, _ = times(1e12, torch.float32)
    x = 1e-15 * torch.randn(3, 4)
    with torch.no_grad(), pytest.raises(rg.RangeOverflow):
        model(x)
    with torch.no_grad():
        h = model[0](x)
    with pytest.raises(rg.RangeOverflow, match="Run it once without gradients"):
        model[1](h)
    with torch.no_grad():
        model(x)
    model(x).sum().backward()


SMALL = [(torch.float32, 1e-27), (torch.float64, 1e-20), (torch.bfloat16, 1e-27)]


def small_net(dtype: torch.dtype, **settings: Any) -> rg.MomentumNet:
    torch.manual_seed(0)
    return rg.MomentumNet([nn.Linear(5, 5, bias=False).to(dtype) for _ in range(6)], GAMMA, **settings)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dtype", "least"), SMALL)
def test_activations_that_shrink_are_refused_where_the_first_batch_would_have_been(
    dtype: torch.dtype, least: float, training: bool
) -> None:
    net, x = small_net(dtype).train(training), torch.randn(3, 5).to(dtype)
    scale = 1.0
    while scale > 2e3 * least:
        net(x * scale)
        scale /= 30
    before = dict(net.range.of(training).fixed)
    for _ in range(2):
        with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
            net(x * least)
        assert net.range.of(training).fixed == before
    wanted = small_net(dtype).train(training)(x * scale)
    assert (net(x * scale) - wanted).abs().max() <= torch.finfo(dtype).eps * 16 * wanted.abs().max()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("settled", [True, False])
def test_that_they_shrank_is_said_later_where_it_is_known_later(settled: bool) -> None:
    net, x = small_net(torch.float32), torch.randn(3, 5)
    wanted = net(x)
    net(x * 1e-27)
    with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
        rg.settle(net) if settled else net(x)
    torch.testing.assert_close(net(x), wanted, rtol=1e-6, atol=1e-6)


def test_slack_in_the_range_hides_nothing() -> None:
    """Where the range would move by so little that it is left alone."""
    net, x = small_net(torch.float32), torch.ones(3, 5)
    net(x * 2.0**-79)
    assert isinstance(net.fraction_bits, int)
    assert net.fraction_bits < MOST_BITS
    with pytest.raises(rg.RangeOverflow, match="Multiply the input by a constant"):
        net(x * 2.0**-86)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_are_not_small_later_either(dtype: torch.dtype) -> None:
    net, x = small_net(dtype), torch.randn(3, 5).to(dtype)
    for k in range(6):
        net.train(k % 2 == 0)
        assert not net(torch.zeros_like(x)).any()
        assert net(x).any()
        assert net(x[:0]).shape == (0, 5)


def scaled(by: float) -> nn.Linear:
    linear = nn.Linear(4, 4, bias=False)
    nn.init.eye_(linear.weight)
    linear.weight.data *= by
    return linear


def test_that_an_input_is_nothing_beside_its_activations_is_said() -> None:
    """In the only range that holds them it is 0, and here so is the output."""
    net = rg.MomentumNet([scaled(1e12) for _ in range(3)], gamma=0.5)
    with pytest.warns(UserWarning, match="held to 0 binary digits"):
        net(torch.ones(4))


@pytest.mark.parametrize(("scale", "digits"), [(1e5, "(7|8|9|10)"), (1e6, "[4-7]"), (1e9, "0")])
def test_a_batch_after_one_out_of_all_proportion_is_said_to_be_coarse_once(scale: float, digits: str) -> None:
    net, x = small_net(torch.float32), torch.randn(3, 5)
    wanted = net(x)
    net(scale * x)
    with pytest.warns(UserWarning, match=f"held to {digits} binary digits.*the next pass is held finer"):
        net(x)
    torch.testing.assert_close(net(x), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("accelerator")
def test_that_it_was_is_said_later_where_it_is_known_later() -> None:
    net, x = small_net(torch.float32), torch.randn(3, 5)
    wanted = net(x)
    rg.settle(net)
    net.range.fixed = {torch.int32: calibrated(1e9, 1e9, torch.int32)}
    net(x)
    with pytest.warns(UserWarning, match="held to 0 binary digits"):
        rg.settle(net)
    torch.testing.assert_close(net(x), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_networks_have_is_not_called_coarse(dtype: torch.dtype) -> None:
    """Activations a thousand times the input, as of language models; warnings are errors here."""
    net = rg.MomentumNet([scaled(7.0).to(dtype) for _ in range(6)], gamma=0.5)
    for _ in range(3):
        assert net(torch.full((2, 4), 0.1, dtype=dtype)).max() > 100


def test_the_stage_of_a_converted_model_is_named() -> None:
    model = rg.convert(nn.Sequential(*(Times(0.0) for _ in range(4))), gamma=GAMMA, stages=[""])
    with torch.no_grad(), pytest.raises(rg.RangeOverflow, match=r"stage '0-3'.*Multiply the input by a constant"):
        model(1e-30 * torch.randn(3, 4))


@pytest.mark.parametrize("converted", [True, False])
def test_evaluation_goes_with_a_training_that_grew(converted: bool) -> None:
    """Evaluated before training (a sanity check), it has a range of its own, which training leaves behind."""
    torch.manual_seed(0)
    blocks = [nn.Linear(8, 8, bias=False) for _ in range(6)]
    net: nn.Module = rg.MomentumNet(blocks, GAMMA)
    if converted:
        whole = nn.Sequential(*(Times(0.1) for _ in range(6)))
        net, blocks = rg.convert(whole, gamma=GAMMA, stages=[""]), [block.w for block in whole]
    x = torch.randn(16, 8 - 4 * converted)
    with torch.no_grad():
        net.eval()(x)
    for _ in range(60):
        net.train()(x).square().mean().backward()
        with torch.no_grad():
            for block, linear in zip(net if converted else blocks, blocks, strict=True):
                if converted:
                    block.size *= 1.08
                else:
                    linear.weight *= 1.03
    with torch.no_grad():
        assert net.eval()(x).isfinite().all()


def times_four(converted: bool) -> tuple[nn.Module, nn.Sequential]:
    """A momentum network whose f is of one size, whatever x is; and a plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Times(1.0) for _ in range(4)))
    own = copy.deepcopy(plain)
    if converted:
        return rg.convert(own, gamma=GAMMA, stages=[""]), plain
    return rg.MomentumNet(own, GAMMA, form="block"), plain


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("looked", [True, False])
def test_a_spike_in_training_costs_evaluation_few_digits(converted: bool, looked: bool) -> None:
    net, plain = times_four(converted)
    x = torch.randn(3, 4)
    wanted = recurrence(plain.double(), x)
    with torch.no_grad():
        for scale in (1.0, 1e4):
            net.train()(scale * x)
            if looked:
                repr(net.eval())
            for _ in range(2):
                assert (net.eval()(x).double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()


@pytest.mark.parametrize("converted", [True, False])
def test_evaluation_on_quiet_batches_is_not_taken_by_surprise(converted: bool) -> None:
    """Its range may be finer than training's, by no more than leaves it room for what training has."""
    net, _ = times_four(converted)
    blocks = list(net) if converted else list(net.blocks)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for training, size in ((True, 100.0), (False, 0.3), (False, 0.3), (True, 100.0), (False, 100.0)):
            for block in blocks:
                block.size = size
            assert net.train(training)(x).isfinite().all()
