"""Couplings on the tape: the bits of stored activations, exact inverses, flat memory, clear refusals."""

import copy

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Mlp, assert_same_bits, conv, same_in_every_mode, train_step
from retrograde.memory import held_bytes
from retrograde.nets.coupling import CouplingNet
from retrograde.nets.revnet import RevNet, parameters


def mlps(depth: int, width: int = 4) -> list[nn.Module]:
    return [Mlp(width, 6) for _ in range(depth)]


def revnet(depth: int, **options: object) -> RevNet:
    return RevNet(mlps(depth), mlps(depth), **options)


def fixed_value(state: object, x: Tensor) -> Tensor:
    return state.fixed.decode(state.fixed.encode(x), x.dtype)


@pytest.mark.parametrize("depth", [1, 2, 30])
@pytest.mark.parametrize("kind", ["mlp", "conv+batchnorm"])
@pytest.mark.parametrize("verify", ["off", "strict"])
def test_gradients_are_those_of_stored_activations(depth: int, kind: str, verify: str) -> None:
    make, shape = {"mlp": (lambda: Mlp(4, 6), (3, 8)), "conv+batchnorm": (lambda: conv(2), (2, 4, 5, 5))}[kind]
    net = RevNet([make() for _ in range(depth)], [make() for _ in range(depth)], verify=verify)
    found = same_in_every_mode(net, torch.randn(shape).requires_grad_())
    assert found["input"].any()
    assert all(torch.isfinite(g).all() for g in found.values())


def test_against_floats_and_autograd_alone() -> None:
    net = revnet(10, memory="reverse").double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    v, u = x.chunk(2, 1)
    for phi, psi in zip(net.blocks[::2], net.blocks[1::2], strict=True):
        v = v + phi(u)
        u = u + psi(v)
    weights = [x, *net.parameters()]
    expected = torch.autograd.grad(torch.cat([v, u], 1).square().sum(), weights)
    found = torch.autograd.grad(net(x).square().sum(), weights)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_gradcheck(dtype: torch.dtype) -> None:
    net = revnet(5, verify="strict").to(dtype)
    x = torch.randn(2, 8).to(dtype).requires_grad_()
    assert same_in_every_mode(net, x)["input"].dtype == dtype
    if dtype == torch.float64:
        net.memory = "reverse"
        net(x)
        assert torch.autograd.gradcheck(net, (x,))
        assert torch.autograd.gradgradcheck(net, (x,), atol=1e-5)


@pytest.mark.parametrize("frozen", [[0], [0, 1, 2], [3, 4], [7], list(range(8))])
@pytest.mark.parametrize("needs_input", [True, False])
def test_frozen_blocks_anywhere(frozen: list[int], needs_input: bool) -> None:
    net = revnet(4, verify="strict")
    for k in frozen:
        net.blocks[k].requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=needs_input)
    if len(frozen) == 8 and not needs_input:
        assert not net(x).requires_grad
        return
    assert ("input" in same_in_every_mode(net, x)) == needs_input


def test_extra_inputs_dropout_and_tied_weights() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.dropout = Mlp(4, 6), nn.Dropout(0.3)

        def forward(self, x: Tensor, shift: Tensor, *, scale: float) -> Tensor:
            return self.dropout(self.f(x + shift)).mul_(scale)

    block = Noisy()
    net = RevNet([block, Noisy(), block], [block] * 3, verify="strict")
    shift = torch.randn(4, requires_grad=True)
    grads = []
    for mode in ("store", "reverse", "checkpoint"):
        net.memory = mode
        torch.manual_seed(3)
        y = net(torch.ones(3, 8), shift, scale=0.7)
        grads.append(torch.autograd.grad(y.square().sum(), [shift, *net.parameters()]))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_blocks_that_write_to_their_input_and_autocast() -> None:
    net = RevNet(
        *([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(4)] for _ in range(2)), verify="strict"
    )
    same_in_every_mode(net, torch.randn(3, 8, requires_grad=True))
    grads = []
    for mode in ("store", "reverse", "checkpoint"):
        net.memory = mode
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.ones(3, 8)).square().mean()
        grads.append(torch.autograd.grad(loss, list(net.parameters())))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_nothing_is_kept_without_gradients() -> None:
    net, x = revnet(5, memory="reverse"), torch.randn(2, 8)
    with torch.no_grad():
        y = net(x)
    with torch.inference_mode():
        z = net(x)
    assert y.grad_fn is None
    assert torch.equal(y, z)
    assert torch.equal(y, net(x).detach())


@pytest.mark.parametrize("mode", ["reverse", "checkpoint"])
def test_retained_graphs_and_second_order(mode: str) -> None:
    net = revnet(4, memory=mode, fixed_point=rg.FixedPoint(24, torch.int32), verify="strict")
    reference = copy.deepcopy(net)
    reference.memory = "store"
    x, found = torch.randn(3, 8), []
    for n in (net, reference):
        leaf = x.clone().requires_grad_()
        y = n(leaf).square().sum()
        (once,) = torch.autograd.grad(y, leaf, retain_graph=True)
        (twice,) = torch.autograd.grad(y, leaf, create_graph=True)
        penalty = torch.autograd.grad(twice.square().sum(), [leaf, *n.parameters()], retain_graph=True)
        y.backward()
        found.append([once, twice.detach(), *penalty, leaf.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("depth", [1, 50, 2_000])
def test_inverse_recovers_the_input_bit_for_bit(depth: int) -> None:
    phi, psi = Mlp(4, 6), Mlp(4, 6)
    for block in (phi, psi):
        block.outer.weight.data /= depth
    net = RevNet([phi] * depth, [psi] * depth)
    x = torch.randn(3, 8)
    state = net.encode(x)
    assert not torch.equal(state.x, x)
    assert torch.equal(net.inverse(state), fixed_value(state, x))


def test_bytes_held_do_not_grow_with_depth() -> None:
    """Reverse: 4 bytes per element, once. Store: every activation, so the same test fails for it."""
    x, slope = torch.randn(4_096, 8), {}
    for memory in ("reverse", "checkpoint", "store"):
        held = []
        for depth in (10, 30):
            net = RevNet(
                [Mlp(4, 4)] * depth, [Mlp(4, 4)] * depth, memory=memory, fixed_point=rg.FixedPoint(20, torch.int32)
            )
            net(x)
            held.append(held_bytes(lambda: net(x).sum()) / x.numel())  # noqa: B023
        slope[memory] = (held[1] - held[0]) / 20
        if memory == "reverse":
            assert 4 <= held[1] < 4.5
    assert slope["reverse"] < 0.01
    assert slope["checkpoint"] == pytest.approx(4, abs=0.1)
    assert slope["store"] > 7


def test_it_trains() -> None:
    net, x = revnet(4, memory="reverse", verify="strict"), torch.randn(64, 8)
    target = x.roll(1, 1).sin()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = (net(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3


def test_channels_last_and_the_last_dimension() -> None:
    net = RevNet([conv(2) for _ in range(3)], [conv(2) for _ in range(3)], verify="strict")
    same_in_every_mode(net, torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_())
    net = RevNet(mlps(3), mlps(3), dim=-1, verify="strict")
    same_in_every_mode(net, torch.randn(2, 5, 8, requires_grad=True))


def test_squeezes_are_rewound_too() -> None:
    net = CouplingNet([conv(2), conv(2), conv(8), conv(8), conv(8)], squeezes=[1, 2, 1, 1, 2], verify="strict")
    x = torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    found = same_in_every_mode(net, x)
    assert found["output"].shape == (2, 64, 2, 2)
    state = net.encode(x)
    assert torch.equal(net.inverse(state), fixed_value(state, x))


def test_matching_parameters() -> None:
    blocks = [Mlp(32, 64) for _ in range(8)]
    net, ratio = RevNet.matching(blocks, lambda: Mlp(16, 32))
    assert len(net.blocks) == 2 * 16
    assert ratio == parameters(net) / parameters(*blocks)
    assert ratio == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("shape", [(2, 7), (2,), ()])
def test_odd_channels(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"even number of channels there; got .* Pad a channel"):
        revnet(2)(torch.ones(shape))


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="2 phi and 3 psi"):
        RevNet(mlps(2), mlps(3))
    with pytest.raises(ValueError, match="memory must be one of"):
        revnet(1, memory="magic")
    with pytest.raises(ValueError, match="at least one block"):
        RevNet([], [])
    with pytest.raises(TypeError, match="floating-point tensor"):
        revnet(1)(torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(rg.RangeOverflow, match="NaN or Inf in the input"):
        revnet(1)(torch.full((2, 8), float("nan")))
    with pytest.raises(rg.RangeOverflow, match=r"beyond .*28 fraction bits"):
        revnet(1, fixed_point=rg.FixedPoint(28, torch.int32))(torch.full((2, 8), 5.0))
    assert revnet(1, fixed_point=rg.FixedPoint(28, torch.int32), overflow="nan")(torch.full((2, 8), 5.0)).isnan().all()
    with pytest.raises(ValueError, match="turned a"):
        RevNet([nn.Linear(4, 3)], [nn.Linear(4, 4)])(torch.ones(2, 8))
    with pytest.raises(ValueError, match="divisible by 2"):
        CouplingNet([conv(2)], squeezes=[2])(torch.ones(1, 4, 5, 4))
    with pytest.raises(ValueError, match="one whole number"):
        CouplingNet([conv(2)], squeezes=[2, 1])


def test_a_block_that_does_not_repeat_itself_is_seen() -> None:
    class Unsteady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.linear(x) + 1e-3 * self.calls

    for verify, text in (("strict", "block 2 did not repeat itself"), ("auto", "did not rewind to its start")):
        net = RevNet(
            [Mlp(4), Unsteady()], mlps(2), memory="reverse", verify=verify, fixed_point=rg.FixedPoint(20, torch.int32)
        )
        with pytest.raises(rg.ReplayError, match=text):
            net(torch.randn(2, 8)).sum().backward()


def test_states_of_other_networks() -> None:
    net, x = revnet(3), torch.randn(2, 8)
    state = net.encode(x)
    with pytest.raises(ValueError, match="6 blocks, against 4 blocks"):
        revnet(2).inverse(state)
    with pytest.raises(ValueError, match="did not rewind"):
        revnet(3).inverse(state)
    with pytest.raises(ValueError, match="not a state"):
        net.inverse(x)


def test_the_range_follows_and_modes_agree_after_it() -> None:
    net = revnet(3, memory="reverse")
    bits, x = [], torch.randn(2, 8)
    for scale in torch.logspace(0, 4, 20).tolist():
        net(x * scale).sum().backward()
        bits.append(net.fixed_point.bits)
    assert bits[-1] <= bits[0] - 10
    x.requires_grad_()
    found = []
    for mode in ("store", "reverse"):
        net.memory = mode
        found.append(train_step(net, x * 1e4))
    assert_same_bits(*found)
