"""The graph is the genuine one: what works with autograd works here, with the bits of stored activations."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Attention, Mlp, assert_same_bits, same_in_every_mode, stack, train_step

MODES = ["reverse", "checkpoint", "store"]


class Conditioned(nn.Module):
    """f(x, memory, scale=…) with a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Mlp(), nn.Linear(8, 8)
        self.cross.weight.requires_grad_(False)

    def forward(self, x: Tensor, memory: Tensor, *, scale: Tensor, offset: float = 0.0) -> Tensor:
        return self.own(x) * scale + torch.sigmoid(self.cross(memory)) + offset


def test_extra_inputs_with_gradients() -> None:
    blocks = [Conditioned() for _ in range(7)]
    x, memory, scale = torch.randn(3, 8), torch.randn(3, 8), torch.ones(8)
    found = []
    for mode in MODES:
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=mode, fraction_bits=24, verify="blocks")
        leaves = [t.clone().requires_grad_() for t in (x, memory, scale)]
        y = net(leaves[0], leaves[1], scale=leaves[2], offset=0.1)
        trained = [p for p in net.parameters() if p.requires_grad]
        found.append(torch.autograd.grad(y.square().sum(), [*leaves, *trained]))
    assert all(g.any() for g in found[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("frozen", [[0], [0, 1, 2], [2, 3], [5], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("needs_input", [True, False])
def test_frozen_blocks_anywhere(frozen: list[int], needs_input: bool) -> None:
    blocks, x = stack("mlp", 6)
    for k in frozen:
        blocks[k].requires_grad_(False)
    net = rg.MomentumNet(blocks, verify="end")
    if len(frozen) == 6 and not needs_input:
        assert not net(x).requires_grad
        return
    found = same_in_every_mode(net, x.requires_grad_(needs_input))
    assert ("input" in found) == needs_input


def test_blocks_that_save_nothing_are_sought_past() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5

    blocks = [Mlp(), Double(), Double(), Mlp(), Double()]
    same_in_every_mode(rg.MomentumNet(blocks, verify="end"), torch.randn(3, 8).requires_grad_())


def test_tied_weights_and_every_kind_of_sequence() -> None:
    block, x = Mlp(), torch.randn(3, 8, requires_grad=True)
    tied = rg.MomentumNet([block] * 9, verify="end")
    assert len(list(tied.parameters())) == 3
    same_in_every_mode(tied, x)
    blocks = [Mlp() for _ in range(4)]
    outputs = [
        rg.MomentumNet(b, fraction_bits=20)(x)
        for b in (blocks, nn.ModuleList(blocks), nn.Sequential(*blocks), (b for b in blocks))
    ]
    assert all(torch.equal(y, outputs[0]) for y in outputs)


@pytest.mark.parametrize("mode", MODES)
def test_used_twice_in_one_graph_and_several_forwards_before_the_backwards(mode: str) -> None:
    blocks, x = stack("attention+dropout", 5)
    net = rg.MomentumNet(blocks, memory=mode, verify="blocks", fraction_bits=22)
    reference = rg.MomentumNet(copy.deepcopy(blocks), memory="store", fraction_bits=22)
    grads = []
    for n in (net, reference):
        torch.manual_seed(3)
        a = n(n(x))  # twice in one graph
        b, c = n(x * 2), n(-x)  # and two more passes
        c.sum().backward()
        (a.sum() + b.square().sum()).backward()  # accumulates
        grads.append([p.grad for p in n.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*grads, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_retain_graph_and_second_order(mode: str) -> None:
    blocks, x = stack("mlp", 6)
    net = rg.MomentumNet(blocks, memory=mode, fraction_bits=24, verify="end")
    reference = rg.MomentumNet(copy.deepcopy(blocks), memory="store", fraction_bits=24)
    found = []
    for n in (net, reference):
        leaf = x.clone().requires_grad_()
        y = n(leaf).square().sum()
        (once,) = torch.autograd.grad(y, leaf, retain_graph=True)
        (twice,) = torch.autograd.grad(y, leaf, create_graph=True)
        penalty = torch.autograd.grad(twice.square().sum(), [leaf, *n.parameters()], retain_graph=True)
        y.backward()
        found.append([once, twice.detach(), *penalty, leaf.grad])
    assert torch.equal(found[0][0], found[0][1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][2].any()


@pytest.mark.parametrize("mode", ["reverse", "checkpoint"])
def test_backward_twice_without_retain_graph_raises(mode: str) -> None:
    blocks, x = stack("mlp", 4)
    net = rg.MomentumNet(blocks, memory=mode)
    loss = net(x).sum()
    loss.backward()
    before = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=r"retain_graph|second time"):
        loss.backward()
    assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))


def test_partial_gradients() -> None:
    blocks, x = stack("mlp", 8)
    found = []
    for mode in MODES:
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=mode, fraction_bits=24)
        y = net(x.clone().requires_grad_()).sum()
        found.append(torch.autograd.grad(y, [net.blocks[6].inner.weight, net.blocks[7].outer.weight]))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_in_place_blocks_do_no_harm() -> None:
    class Scribble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5).relu_()
            return self.linear(x)

    class Gentle(Scribble):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear((x * 0.5).relu())

    x = torch.randn(3, 8, requires_grad=True)
    for form in ("branch", "block"):
        scribbles = [Scribble() for _ in range(5)]
        net = rg.MomentumNet(scribbles, form=form, verify="blocks", fraction_bits=22)
        found = same_in_every_mode(net, x)
        gentle = rg.MomentumNet([Gentle() for _ in range(5)], form=form, memory="store", fraction_bits=22)
        gentle.load_state_dict(net.state_dict())
        assert_same_bits(found, train_step(gentle, x))


def test_a_block_that_takes_a_gradient_inside() -> None:
    class Energy(nn.Module):
        """f(x) = −∇E(x), as in Hamiltonian networks."""

        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    net = rg.MomentumNet([Energy() for _ in range(4)], gamma=1, verify="end", fraction_bits=22)
    same_in_every_mode(net, torch.randn(3, 8, requires_grad=True))


def test_hooks_and_optimizer_in_backward() -> None:
    blocks, x = stack("mlp", 6)
    found = {}
    for mode in MODES:
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=mode, fraction_bits=24)

        def step(p: Tensor) -> None:
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        net(x).square().sum().backward()
        found[mode] = {n: p.detach() for n, p in net.named_parameters()}
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])


def test_mode_changed_between_forward_and_backward() -> None:
    blocks, x = stack("attention+dropout", 4)
    found = []
    for memory in ("store", "reverse"):
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=memory, fraction_bits=22, verify="end")
        torch.manual_seed(5)
        y = net(x)
        net.eval()
        y.sum().backward()
        assert not any(m.training for m in net.modules())
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_batchnorm_statistics_move_once() -> None:
    blocks, x = stack("conv+batchnorm", 3)
    net = rg.MomentumNet(blocks, memory="reverse")  # also calibrates on this pass
    net(x).sum().backward()
    assert all(int(m.num_batches_tracked) == 1 for m in net.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", ["branch", "block"])
def test_autocast(inside: bool, form: str) -> None:
    blocks, x = stack("mlp", 50)
    found = []
    for mode in MODES:
        net = rg.MomentumNet(copy.deepcopy(blocks), memory=mode, form=form, fraction_bits=22, verify="end")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(x)
            loss = y.square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([y.detach(), *(p.grad for p in net.parameters())])
    assert found[0][0].dtype == torch.float32
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_nothing_is_kept_without_gradients() -> None:
    blocks, x = stack("mlp", 20)
    net = rg.MomentumNet(blocks, memory="reverse").eval()
    with torch.no_grad():
        y = net(x)
    with torch.inference_mode():
        z = net(x)
    assert y.grad_fn is None
    assert torch.equal(y, z)
    assert torch.equal(y, net(x).detach())


def test_copies_pickles_and_state_dicts_after_a_forward() -> None:
    blocks, x = stack("conv+batchnorm", 4)
    net = rg.MomentumNet(blocks, memory="reverse")
    pending = net(x)
    net.eval()
    expected = net(x).detach()
    copied = copy.deepcopy(net)
    thawed = pickle.loads(pickle.dumps(net))
    fresh = rg.MomentumNet(stack("conv+batchnorm", 4)[0], memory="reverse", fraction_bits=net.fraction_bits).eval()
    fresh.load_state_dict(net.state_dict())
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copied, thawed, loaded):
        assert torch.equal(other(x), expected)
    assert torch.allclose(fresh(x), expected, atol=1e-5)  # without the calibrated guard digits
    assert set(net.state_dict()) == {f"blocks.{k}" for k in nn.ModuleList(blocks).state_dict()}
    pending.sum().backward()


def test_channels_last_stays_channels_last() -> None:
    blocks, x = stack("conv+batchnorm", 4)
    x = x.contiguous(memory_format=torch.channels_last)
    seen = []
    blocks[2].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    same_in_every_mode(rg.MomentumNet(blocks, verify="end"), x.requires_grad_())
    assert all(seen)


def test_odd_inputs() -> None:
    block = Mlp()
    for x in (torch.randn(0, 8), torch.randn(8), torch.randn(4, 3, 8).transpose(0, 1), torch.randn(1, 8).expand(5, 8)):
        same_in_every_mode(rg.MomentumNet([block] * 3, fraction_bits=20, verify="end"), x.requires_grad_())


def test_repr_says_what_it_is() -> None:
    net = rg.MomentumNet([Attention()] * 3, gamma=0.99, velocity="first")
    text = net.extra_repr()
    for part in ("depth=3", "gamma=99/100", "velocity='first'", "memory='auto'", "fraction_bits='auto'"):
        assert part in text


def test_the_range_follows_drifting_scales() -> None:
    block = nn.Linear(4, 4, bias=False)
    net = rg.MomentumNet([block] * 8, memory="reverse")
    x = torch.randn(2, 4)
    bits = []
    for scale in torch.logspace(0, 4, 40).tolist() + torch.logspace(4, -3, 40).tolist():
        net(x * scale).sum().backward()
        bits.append(net.fraction_bits)
    assert min(bits) <= bits[0] - 10
    assert bits[-1] >= bits[0] + 5
