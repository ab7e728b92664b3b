"""Builders: sizes and names as published, momentum with the same parameters, the bits of stored activations."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import assert_same_bits, train_step
from retrograde.nets.resnet import BasicBlock, MomentumStage, ResNet, momentum_resnet, resnet, thin_resnet
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
    ("name", "size"), [("resnet18", 64), ("cifar-resnet50", 8), ("thin-resnet20", 8), ("thin-resnet29", 8)]
)
def test_forward_and_the_same_parameters(name: str, size: int) -> None:
    momentum, zero = momentum_resnet(name, classes=4).eval(), momentum_resnet(name, 0, classes=4).eval()
    kind, _, depth = name.rpartition("resnet")
    make = {"": resnet, "cifar-": lambda d, **s: resnet(d, size="cifar", **s), "thin-": thin_resnet}[kind]
    plain = make(int(depth), classes=4).eval()
    momentum.load_state_dict(plain.state_dict())
    zero.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, size, size)
    with torch.no_grad():
        assert torch.equal(zero(x), plain(x))
        assert not torch.allclose(momentum(x), plain(x))
    plain.load_state_dict(momentum.state_dict())
    assert list(plain.state_dict()) == list(momentum.state_dict())


@pytest.mark.parametrize("velocity", [None, "first", "learned"])
def test_momentum_gradients_are_those_of_stored_activations(velocity: str | None) -> None:
    nets = {
        m: thin_resnet(20, gamma=0.9, velocity=velocity, memory=m, verify="strict")
        for m in ("store", "reverse", "checkpoint")
    }
    x, found = torch.randn(2, 3, 8, 8, requires_grad=True), {}
    for memory, net in nets.items():
        net.load_state_dict(nets["store"].state_dict())
        found[memory] = train_step(net, x)
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
    assert found["reverse"]["layer3.2.conv1.weight"].any()


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


@pytest.mark.parametrize("velocity", [None, "learned"])
def test_copies_and_files_keep_the_momentum_stages_tied_to_their_blocks(velocity: str | None) -> None:
    net, x = thin_resnet(20, gamma=0.9, velocity=velocity).eval(), torch.randn(1, 3, 8, 8)
    expected = net(x)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), expected)
        parts = [other.layer1[0], *([other.velocity1.block] if velocity else [])]
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


def test_they_train() -> None:
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 2
    for settings in ({}, {"gamma": 0.9, "memory": "reverse"}):
        net = thin_resnet(20, classes=2, **settings)
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        losses = []
        for _ in range(12):
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] / 3


@pytest.mark.parametrize("depth", [18, 101, 152])
def test_a_revnet_with_as_many_parameters(depth: int) -> None:
    with torch.device("meta"):
        net, plain = rev_resnet(depth), resnet(depth)
    assert parameters(net) == pytest.approx(parameters(plain), rel=0.01)
    assert all(isinstance(stage[-1], RevNet) for stage in net.stages())


def test_the_revnet_runs() -> None:
    net = rev_resnet(18, size="cifar", classes=3, memory="reverse", verify="strict")
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_wrong_input() -> None:
    with pytest.raises(ValueError, match="depth must be one of 18, 34, 50, 101, 152; got 20"):
        resnet(20)
    with pytest.raises(ValueError, match=r"got 1201.*Near it are 1196, 1199, 1202, 1208"):
        thin_resnet(1201)
    with pytest.raises(ValueError, match="block must be one of"):
        thin_resnet(20, block="wide")
    with pytest.raises(ValueError, match="got 2"):
        thin_resnet(2)
    with pytest.raises(ValueError, match="no network is called 'vgg16'"):
        momentum_resnet("vgg16")
    with pytest.raises(ValueError, match="memory are options of momentum stages"):
        resnet(18, memory="reverse")
    with pytest.raises(ValueError, match="gamma"):
        momentum_resnet("thin-resnet20", 1.5)
    with pytest.raises(ValueError, match="size must be one of"):
        resnet(18, size="mnist")


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


def test_the_papers_form_in_reverse_has_the_bits_of_stored_activations() -> None:
    nets = {m: thin_resnet(20, residual="branch", gamma=0.9, memory=m) for m in ("store", "reverse")}
    nets["reverse"].load_state_dict(nets["store"].state_dict())
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    found = {memory: train_step(net, x) for memory, net in nets.items()}
    assert_same_bits(found["store"], found["reverse"])
    assert found["reverse"]["layer3.2.conv1.weight"].any()
    twin = copy.deepcopy(nets["reverse"])
    with torch.no_grad():
        twin.layer2[1].conv1.weight.zero_()
        assert not torch.equal(twin(x), nets["reverse"](x))


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


def test_what_the_papers_form_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="factor is for residual='branch'"):
        thin_resnet(20, gamma=1, factor=0.0)
    with pytest.raises(ValueError, match="have one form"):
        thin_resnet(20, residual="branch", gamma=0.9, form="block")
    with pytest.raises(ValueError, match="residual must be one of"):
        thin_resnet(20, residual="sum")
