"""Everything that is refused says what was given, what is allowed and what to do, and leaves gradients alone."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import retrograde as rg
from problems import Mlp, float_recurrence, stack
from retrograde.nets import RevNet

COARSE = pytest.mark.filterwarnings("ignore:the input of this pass")


@pytest.mark.parametrize("gamma", [-0.1, 1.5, math.nan, math.inf, 1 - 1e-8, Fraction(1, 10**7)])
def test_gamma_out_of_range(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        rg.MomentumNet([Mlp()], gamma=gamma)


@pytest.mark.parametrize("gamma", ["0.9", None, True, object()])
def test_gamma_that_is_no_number(gamma: object) -> None:
    with pytest.raises(TypeError, match="gamma"):
        rg.MomentumNet([Mlp()], gamma=gamma)


def test_gamma_zero_cannot_be_reversed() -> None:
    with pytest.raises(ValueError, match=r"gamma = 0 .* memory='checkpoint'"):
        rg.MomentumNet([Mlp()], gamma=0, memory="reverse")
    net = rg.MomentumNet([Mlp()] * 2, gamma=[0.5, 0])
    with pytest.raises(ValueError, match="gamma = 0"):
        net.memory = "reverse"
    with pytest.raises(ValueError, match="gamma = 0"):
        net.encode(torch.ones(1, 8))
    assert net.memory == "auto"
    net(torch.ones(1, 8)).sum().backward()


def test_blocks() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        rg.MomentumNet([])
    with pytest.raises(TypeError, match=r"\[block\] \* depth"):
        rg.MomentumNet(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"block 1 must be an nn\.Module; got function"):
        rg.MomentumNet([Mlp(), lambda x: x])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("form", "residual"),
        ("memory", "magic"),
        ("verify", True),
        ("overflow", "warn"),
        ("velocity", "zero"),
        ("velocity", 3),
    ],
)
def test_options(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        rg.MomentumNet([Mlp()], **{option: value})


@pytest.mark.parametrize("bits", [1.5, "many", True, 1000])
def test_fraction_bits(bits: object) -> None:
    with pytest.raises(ValueError, match="fraction_bits must be 'auto' or a whole number"):
        rg.MomentumNet([Mlp()], fraction_bits=bits)


class Breaks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return {
            "shape": lambda: y[:, :4],
            "dtype": lambda: y.double(),
            "device": lambda: y.to("meta"),
            "tuple": lambda: (y, y),
            "nan": lambda: y * math.nan,
            "inf": lambda: y / 0,
            "large": lambda: y * 1e9,
        }[self.how]()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
@pytest.mark.parametrize("bits", [20, "auto"])
@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("shape", ValueError, r"block 2 turned a \(3, 8\) .* into a \(3, 4\)"),
        ("dtype", ValueError, r"block 2 turned .*float64"),
        ("device", ValueError, r"block 2 turned .* on meta"),
        ("tuple", TypeError, r"block 2 returned tuple"),
        ("nan", rg.RangeOverflow, r"NaN or Inf out of block 2"),
        ("inf", rg.RangeOverflow, r"NaN or Inf out of block 2"),
    ],
)
def test_blocks_that_break(memory: str, bits: int | str, how: str, error: type[Exception], text: str) -> None:
    net = rg.MomentumNet([Mlp(), Mlp(), Breaks(how), Mlp()], memory=memory, fraction_bits=bits)
    weights = [p.clone() for p in net.parameters()]
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(error, match=text):
            net(torch.randn(3, 8))
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))


def test_values_beyond_the_range() -> None:
    net = rg.MomentumNet([Mlp(), Breaks("large")], fraction_bits=20)
    with pytest.raises(rg.RangeOverflow, match=r"block 1 is beyond .* fraction_bits=20"):
        net(torch.randn(3, 8))
    with pytest.raises(rg.RangeOverflow, match="the input"):
        net(torch.full((1, 8), 5e4))
    with pytest.raises(rg.RangeOverflow, match="NaN or Inf in the input"):
        net(torch.full((1, 8), math.nan))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("known", [False, True])
def test_nan_in_the_input_is_not_laid_to_the_first_block(known: bool, value: float) -> None:
    net, x = rg.MomentumNet([Mlp() for _ in range(3)]), torch.randn(2, 8)
    if known:  # else it is the survey that meets it
        net(x)
    x[1, 3] = value
    for training in (True, False):
        with pytest.raises(rg.RangeOverflow, match="NaN or Inf in the input"):
            net.train(training)(x)
    launched = rg.MomentumNet([Mlp() for _ in range(3)], velocity=lambda x: x * value)
    with pytest.raises(rg.RangeOverflow, match="NaN or Inf in the initial velocity"):
        launched(torch.ones(2, 8))


@COARSE
def test_after_an_overflow_the_range_is_found_anew() -> None:
    block, x = nn.Linear(4, 4), torch.randn(2, 4)
    net = rg.MomentumNet([block] * 3)
    net(x)
    with torch.no_grad():
        block.weight *= 1e5
    with pytest.raises(rg.RangeOverflow, match="calibrates anew"):
        net(x)
    net(x).sum().backward()


@COARSE
def test_evaluation_at_another_scale_is_calibrated_on_the_spot() -> None:
    """Running statistics lag behind early in training, so activations in eval mode may be far from those in training."""
    net, x = rg.MomentumNet([nn.BatchNorm1d(4) for _ in range(6)]), torch.randn(16, 4) * 3
    net(x)
    net.eval()
    for norm in net.blocks:
        norm.running_var.fill_(1e-4)
    with torch.no_grad():
        assert net(x).isfinite().all()
    net.train()
    net(x)


@COARSE
def test_inputs_of_another_scale_are_no_overflow() -> None:
    net = rg.MomentumNet([nn.Linear(4, 4)] * 3)
    for scale in (0.0, 1.0, 1e4, 1e-6, 1e6):
        net(torch.randn(2, 4) * scale).sum().backward()


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


def test_tiny_activations_keep_their_digits() -> None:
    for scale in (1e-7, 1e-9, 1e-12):
        blocks = [nn.Linear(8, 8, bias=False) for _ in range(10)]
        x = torch.randn(4, 8) * scale
        y = rg.MomentumNet(blocks)(x)
        truth = float_recurrence([b.double() for b in blocks], Fraction(9, 10), x.double()).detach()
        assert float((y.detach().double() - truth).norm() / truth.norm()) < 1e-6


def test_half_precision_does_not_decode_to_infinity() -> None:
    class Const(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, 3e4)

    with pytest.raises(rg.RangeOverflow, match=r"beyond 6\.55e\+04"):
        rg.MomentumNet([Const(), nn.Tanh()], gamma=1)(torch.full((1, 2), 4e4).half())


def test_blocks_added_later() -> None:
    net = rg.MomentumNet([Mlp()])
    net.blocks.append(Mlp())
    with pytest.raises(ValueError, match=r"2 blocks now, and 1 values of gamma"):
        net(torch.randn(2, 8))
    net.gamma = 0.9
    net(torch.randn(2, 8))


@pytest.mark.parametrize("how", ["nan", "large"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_overflow_as_nan_for_loss_scaling_loops(how: str, memory: str) -> None:
    net = rg.MomentumNet([Mlp(), Breaks(how), Mlp()], fraction_bits=20, overflow="nan", memory=memory)
    y = net(torch.randn(3, 8))
    assert y.isnan().all()
    y.sum().backward()  # a loss whose gradient does not depend on y
    assert all(p.grad.isnan().any() for p in net.blocks[2].parameters())
    fine = rg.MomentumNet([Mlp()] * 3, fraction_bits=20, overflow="nan", memory=memory)
    fine(torch.randn(3, 8)).sum().backward()
    assert all(p.grad.isfinite().all() for p in fine.parameters())


@pytest.mark.parametrize(
    "x", [torch.ones(2, 8, dtype=torch.int64), [1.0], None, torch.ones(2, 8, dtype=torch.complex64)]
)
def test_input_that_is_no_float_tensor(x: object) -> None:
    with pytest.raises(TypeError, match="floating-point tensor"):
        rg.MomentumNet([Mlp()])(x)


NESTED = [torch.randn(2, 8), torch.randn(3, 8)]


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:.*beta state:UserWarning")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(8).to_sparse(), r"sparse_coo one\. Pass x\.to_dense"),
        (lambda: torch.eye(8).to_sparse_csr(), r"sparse_csr one\. Pass x\.to_dense"),
        (lambda: torch.nested.nested_tensor(NESTED), r"nested one\. Pass x\.to_padded_tensor"),
        (lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged), r"nested one\. Pass x\.to_padded_tensor"),
    ],
)
def test_input_that_is_not_dense(make: Callable[[], Tensor], says: str) -> None:
    with pytest.raises(TypeError, match=f"must be a dense floating-point tensor; got a .*{says}"):
        rg.MomentumNet([Mlp()])(make())


def test_input_without_values() -> None:
    x = torch.empty(2, 8, device="meta")
    with pytest.raises(TypeError, match=r"a meta tensor has no values.*rg\.plan"):
        rg.MomentumNet([Mlp()]).to("meta")(x)
    with pytest.raises(TypeError, match="a meta tensor has no values"):
        rg.MomentumNet([Mlp()], fraction_bits=20).to("meta")(x)
    with torch.no_grad():  # nothing is asked of the values
        assert rg.MomentumNet([Mlp()], fraction_bits=20).to("meta")(x).shape == (2, 8)
    rg.MomentumNet([Mlp()], gamma=0).to("meta")(x).sum().backward()


def traced(net: nn.Module, x: Tensor) -> object:
    return torch.jit.trace(net, x)


def exported(net: nn.Module, x: Tensor) -> object:
    return torch.export.export(net, (x,), strict=False)


def made_fx(net: nn.Module, x: Tensor) -> object:
    return make_fx(net)(x)


def dual(net: nn.Module, x: Tensor) -> object:
    with forward_ad.dual_level():
        return net(forward_ad.make_dual(x, torch.ones_like(x)))


SURROUNDINGS: list[tuple[Callable[[nn.Module, Tensor], object], str]] = [
    (traced, r"torch\.jit\.trace does not see .* write its recurrence out"),
    (exported, r"torch\.export does not see"),
    (made_fx, "make_fx does not see"),
    (dual, r"forward-mode derivatives .* torch\.autograd\.functional\.jvp"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("run", "says"), SURROUNDINGS)
def test_what_does_not_see_through_the_integers(
    run: Callable[[nn.Module, Tensor], object], says: str, grad: bool
) -> None:
    if run is exported and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch does not say that it exports")
    x = torch.randn(2, 8)
    for net in (rg.MomentumNet([Mlp() for _ in range(3)]), RevNet(*([nn.Linear(4, 4)] for _ in range(2)))):
        net(x)
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=says):
            run(net, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_the_plain_network_can_be_traced() -> None:
    net, x = rg.MomentumNet([Mlp() for _ in range(3)], gamma=0), torch.randn(2, 8)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(net, x)(x + 1), net(x + 1))


def test_state_of_another_network() -> None:
    net = rg.MomentumNet([Mlp() for _ in range(3)])
    x = torch.randn(2, 8)
    state = net.encode(x)
    for other in (
        rg.MomentumNet([Mlp() for _ in range(4)]),
        rg.MomentumNet(net.blocks, gamma=0.5),
        rg.MomentumNet(net.blocks, form="block"),
    ):
        with pytest.raises(ValueError, match="not a state of this network: depth=3, gamma=9/10"):
            other.inverse(state)
    with pytest.raises(ValueError, match="did not rewind"):
        rg.MomentumNet([Mlp() for _ in range(3)]).inverse(state)
    with pytest.raises(ValueError, match="not a state"):
        net.inverse(x)


class Unsteady(nn.Module):
    """Counts its runs: never the same twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x * (1 + 1e-3 * self.calls))


@pytest.mark.parametrize("accumulating", [False, True])
@pytest.mark.parametrize(
    ("memory", "verify", "text"),
    [
        ("reverse", "blocks", "block 2 did not repeat itself"),
        ("checkpoint", "blocks", "block 2 did not repeat itself"),
        ("reverse", "end", "did not rewind to its start"),
        ("checkpoint", "end", "block 2 did not repeat itself"),
    ],
)
def test_a_block_that_does_not_repeat_itself(memory: str, verify: str, text: str, accumulating: bool) -> None:
    net = rg.MomentumNet([Mlp(), Mlp(), Unsteady(), Mlp(), Mlp()], memory=memory, verify=verify, fraction_bits=22)
    if accumulating:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
    y = net(torch.randn(3, 8))
    with pytest.raises(rg.ReplayError, match=text):
        y.sum().backward()
    assert all((p.grad is None) if not accumulating else (p.grad == 1).all() for p in net.parameters())


class Branches(nn.Module):
    """Takes another path every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh() if self.calls % 2 else self.linear(x)


def test_other_tensors_saved_in_replay_are_noticed_without_verify() -> None:
    net = rg.MomentumNet([Mlp(), Branches()], memory="reverse", fraction_bits=22)
    with pytest.raises(rg.ReplayError, match=r"block 1 did not repeat itself: .* saved"):
        net(torch.randn(3, 8)).sum().backward()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_parameters_changed_before_backward(memory: str) -> None:
    blocks, x = stack("mlp", 3)
    net = rg.MomentumNet(blocks, memory=memory)
    loss = net(x).sum()
    with torch.no_grad():
        blocks[1].inner.weight.add_(1)
    with pytest.raises(rg.ReplayError, match="block 1 was changed after its forward"):
        loss.backward()


def test_extra_inputs_changed_before_backward() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.linear(x + shift)

    shift = torch.zeros(8)
    net = rg.MomentumNet([Shifted()] * 3, memory="reverse")
    loss = net(torch.randn(2, 8), shift).sum()
    shift += 1
    with pytest.raises(rg.ReplayError, match="extra input"):
        loss.backward()


def test_optimizer_in_backward_refuses_tied_weights() -> None:
    block = Mlp()
    net = rg.MomentumNet([block, Mlp(), block], memory="reverse")

    def step(g: Tensor) -> None:
        with torch.no_grad():
            block.outer.weight -= 0.1 * g

    y = net(torch.randn(2, 8))
    net.blocks[1].outer.weight.register_hook(lambda g: step(torch.ones_like(g)))  # between the two uses of the block
    with pytest.raises(rg.ReplayError, match="block 0 was changed after its forward"):
        y.sum().backward()


def test_a_block_with_state_of_its_own_is_refused() -> None:
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    net = rg.MomentumNet([Mlp(), spectral], memory="reverse", fraction_bits=20)
    with pytest.raises(rg.ReplayError, match=r"block 1 changed a parameter, a buffer .* memory='store'"):
        net(torch.randn(2, 8))
    net.memory = "store"
    net(torch.randn(2, 8)).sum().backward()


def test_an_exception_in_the_replay_leaves_the_tape_usable() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.fail = nn.Linear(8, 8), False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise KeyboardInterrupt
            return self.linear(x).tanh()

    fails = Fails()
    net = rg.MomentumNet([Mlp(), fails, Mlp()], memory="reverse", verify="end", fraction_bits=22)
    x = torch.randn(2, 8)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    loss = net(x).sum()
    fails.fail = True
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    fails.fail = False
    again = torch.autograd.grad(loss, list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))


@pytest.mark.parametrize("bits", [8, 32, 16.0, "16", None, True])
def test_state_bits_that_there_are_not(bits: Any) -> None:
    with pytest.raises(ValueError, match="state_bits must be 'auto'"):
        rg.MomentumNet([Mlp()], state_bits=bits)
    with pytest.raises(ValueError, match="state_bits must be 'auto'"):
        rg.convert(
            nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)),
            state_bits=bits,
        )


def test_16_bit_state_is_not_for_float64() -> None:
    with pytest.raises(ValueError, match="float64"):
        rg.MomentumNet([Mlp()], state_bits=16).double()(torch.randn(2, 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_input_without_values_and_without_gradients(training: bool, dtype: torch.dtype) -> None:
    """Nothing is asked of the values then: as in a plain network, the output is of the right kind."""
    x = torch.empty(2, 8, device="meta", dtype=dtype)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3, enable_nested_tensor=False
    )
    momentum = rg.MomentumNet([Mlp() for _ in range(3)])
    for net in (momentum, RevNet(*([nn.Linear(4, 4)] for _ in range(2))), rg.convert(encoder)):
        net = net.to("meta", dtype).train(training)
        with torch.no_grad():
            y = net(x)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert momentum.fraction_bits == "auto"
    assert not momentum.range.later.waiting
