"""Builders: sizes and names as published, momentum with the same parameters, the bits of stored activations."""

import copy
import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.nets.resnet import BasicBlock, MomentumStage, ResNet, resnet, thin_resnet
from retrograde.nets.revnet import RevNet, parameters, rev_resnet

PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_imagenet_sizes(depth: int) -> None:
    with torch.device("meta"):
        net = resnet(depth)
    assert parameters(net) == PUBLISHED[depth]
    assert sum(isinstance(m, nn.Conv2d) for n, m in net.named_modules() if "downsample" not in n) == depth - 1


def test_names_are_torchvisions() -> None:
    with torch.device("meta"):
        names = set(resnet(50).state_dict())
    assert len(names) == 320  # as many as torchvision's resnet50 has
    assert {
        "conv1.weight", "bn1.num_batches_tracked", "layer1.0.conv3.weight", "layer1.0.downsample.0.weight",
        "layer3.5.bn3.running_var", "layer4.2.conv2.weight", "layer2.0.downsample.1.bias", "fc.weight", "fc.bias",
    } <= names  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "kind"), [(20, "basic"), (110, "basic"), (1202, "basic"), (29, "bottleneck"), (1199, "bottleneck")]
)
def test_thin_depths(depth: int, kind: str) -> None:
    with torch.device("meta"):
        net = thin_resnet(depth)
    assert sum(isinstance(m, nn.Conv2d) for n, m in net.named_modules() if "downsample" not in n) == depth - 1
    assert isinstance(net.layer1[0], BasicBlock) == (kind == "basic")


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (partial(resnet, 18), 64),
        (partial(resnet, 50, size="cifar"), 8),
        (partial(thin_resnet, 20), 8),
        (partial(thin_resnet, 29), 8),
    ],
)
def test_forward_and_the_same_parameters(make: Callable[..., ResNet], size: int) -> None:
    plain, momentum, zero = (make(classes=4, gamma=gamma).eval() for gamma in (None, 0.9, 0))
    momentum.load_state_dict(plain.state_dict())
    zero.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        assert torch.equal(zero(x), plain(x))
        assert not torch.allclose(momentum(x), plain(x))
    plain.load_state_dict(momentum.state_dict())
    assert list(plain.state_dict()) == list(momentum.state_dict())


def test_a_learned_velocity_is_f_of_a_block_of_its_own() -> None:
    """The rest of the network starts as without; the first stage against its recurrence written out."""
    made = []
    for velocity in (None, "learned"):
        torch.manual_seed(0)
        made.append(thin_resnet(20, gamma=0.9, velocity=velocity, memory="store").eval())
    plain, learned = made
    missing, unexpected = learned.load_state_dict(dict(plain.state_dict()), strict=False)
    assert not unexpected
    assert {name.split(".")[0] for name in missing} == {"velocity1", "velocity2", "velocity3"}
    assert all(map(torch.equal, plain.parameters(), learned.parameters()))  # as far as there are any
    x = torch.randn(2, 16, 8, 8).relu()
    with torch.no_grad():
        expected, v = x, learned.velocity1.block.branch(x)
        for block in learned.layer1:
            v = 0.9 * v + 0.1 * (block(expected) - expected)
            expected = expected + v
        torch.testing.assert_close(learned.layer1(x), expected, rtol=1e-4, atol=1e-5)
    image = torch.randn(2, 3, 8, 8)
    assert not torch.allclose(learned(image), plain(image))
    learned.train()(image).sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in learned.named_parameters() if n.startswith("velocity"))
    assert learned.velocity2.block.bn1.num_batches_tracked == 1


@pytest.mark.parametrize("residual", ["relu", "branch"])
@pytest.mark.parametrize("velocity", [None, "learned"])
def test_copies_and_files_keep_the_momentum_stages_tied_to_their_blocks(velocity: str | None, residual: str) -> None:
    net, x = thin_resnet(20, residual=residual, gamma=0.9, velocity=velocity).eval(), torch.randn(1, 3, 8, 8)
    expected = net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), expected)
        assert other.layer1.momentum.recurrence.form == net.layer1.momentum.recurrence.form
        parts = [other.layer1[1], *([other.velocity1.block] if velocity else [])]
        for part in parts:
            kept = copy.deepcopy(part.state_dict())
            part.conv1.weight.data.zero_()
            assert not torch.equal(other(x), expected)
            part.load_state_dict(kept)
            assert torch.equal(other(x), expected)
        other.double()(x.double()).sum().backward()
        assert other.layer3[2].conv1.weight.grad is not None


def test_a_learned_velocity_can_be_replaced() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    net, x = thin_resnet(20, gamma=0.9, velocity="learned").eval(), torch.randn(2, 3, 8, 8)
    without = thin_resnet(20, gamma=0.9).eval()
    without.load_state_dict(dict(net.state_dict()), strict=False)
    other, before = copy.copy(net), net(x)
    other._modules = dict(net._modules)
    assert not torch.allclose(before, without(x))
    for i in (1, 2, 3):
        setattr(other, f"velocity{i}", Nothing())
    torch.testing.assert_close(other(x), without(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net(x), before, rtol=1e-5, atol=1e-6)


def test_stages_are_handed_to_a_momentum_network() -> None:
    stage = thin_resnet(32).stages()[1]
    net = rg.MomentumNet(stage[1:], gamma=0.9, form="block")
    assert net(torch.randn(2, 32, 4, 4)).shape == (2, 32, 4, 4)
    assert MomentumStage(list(stage[:1]), 0.9)(torch.randn(2, 16, 4, 4)).shape == (2, 32, 2, 2)


@pytest.mark.parametrize("depth", [18, 101, 152])
def test_a_revnet_with_as_many_parameters(depth: int) -> None:
    with torch.device("meta"):
        net, plain = rev_resnet(depth), resnet(depth)
    assert parameters(net) == pytest.approx(parameters(plain), rel=0.01)
    assert all(isinstance(stage[-1], RevNet) for stage in net.stages())


def recurrence(net: ResNet, x: Tensor, gamma: float) -> Tensor:
    """The paper's published network, in floats: He's block, then v ← γ·v + (1−γ)·f(x), x ← x + v, from v = 0 in each stage."""
    x = net.relu(net.bn1(net.conv1(x)))
    for i, stage in enumerate(net.stages()):
        x = stage[0](x)
        learned = getattr(net, f"velocity{i + 1}", None)
        v = torch.zeros_like(x) if learned is None else learned(x)
        for block in list(stage)[1:]:
            v = gamma * v + (1 - gamma) * block.branch(x)
            x = x + v
    return net.fc(net.avgpool(x).flatten(1))


@pytest.mark.parametrize("velocity", [None, "learned"])
@pytest.mark.parametrize("gamma", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize("depth", [20, 29])
def test_the_papers_form_is_its_recurrence(depth: int, gamma: float, velocity: str | None) -> None:
    options = {"factor": 0.0} if gamma == 1 else {}  # γ = 1 as the paper's code has it
    net = thin_resnet(depth, residual="branch", gamma=gamma, velocity=velocity, **options).double().eval()
    x = torch.randn(2, 3, 8, 8).double()
    with torch.no_grad():
        assert torch.allclose(net(x), recurrence(net, x, gamma), rtol=1e-6, atol=1e-9)
    plain = thin_resnet(depth, residual="branch").double().eval()
    if velocity is None:
        plain.load_state_dict(net.state_dict())
        with torch.no_grad():
            assert torch.equal(plain(x), recurrence(plain, x, 0))


def test_in_the_papers_form_nothing_follows_the_addition() -> None:
    he, paper = thin_resnet(20).eval(), thin_resnet(20, residual="branch").eval()
    paper.load_state_dict(he.state_dict())
    x = torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        assert torch.equal(paper.layer1[0](x), he.layer1[0](x))  # the first block of a stage is He's
        assert torch.equal(paper.layer1[1](x).relu(), he.layer1[1](x))
        assert (paper.layer1[1](x) < 0).any()


def test_in_the_papers_form_a_stage_of_one_block_takes_no_step() -> None:
    net, plain = thin_resnet(8, residual="branch", gamma=1, factor=0.0).eval(), thin_resnet(8).eval()
    net.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(net(x), plain(x))


def test_at_the_literal_gamma_of_1_no_block_gets_a_gradient() -> None:
    """They get zeros, not None: an optimizer's weight decay reaches them."""
    net = thin_resnet(20, residual="branch", gamma=1, factor=0.0)
    net(torch.randn(2, 3, 8, 8)).square().sum().backward()
    for name, parameter in net.named_parameters():
        step = name.startswith("layer") and name.split(".")[1] != "0"
        assert parameter.grad is not None
        assert bool(parameter.grad.any()) != step or name.endswith("bias"), name
    limit = thin_resnet(20, residual="branch", gamma=1)
    limit(torch.randn(2, 3, 8, 8)).square().sum().backward()
    assert limit.layer1[1].conv1.weight.grad.any()
