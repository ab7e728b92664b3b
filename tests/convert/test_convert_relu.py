"""form="relu": blocks that end in relu(x + f) hand over f; the converted network is that of form="block"."""

import copy

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.convert.convert import stages_of
from retrograde.extras import require
from retrograde.nets.resnet import resnet, thin_resnet

MODES = ["reverse", "checkpoint", "store", "auto"]


def grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [leaf, *model.parameters()])]


def torchvision_resnet() -> nn.Module:
    models = require("torchvision.models")
    return models.resnet.ResNet(models.resnet.Bottleneck, [3, 4, 2, 1], num_classes=5)


@pytest.mark.parametrize("make", [torchvision_resnet, lambda: thin_resnet(20)], ids=["torchvision", "ours"])
@pytest.mark.parametrize("velocity", [None, "first"])
def test_it_is_the_network_of_form_block(make, velocity: str | None) -> None:
    model, x = make().double(), torch.randn(2, 3, 48, 48, dtype=torch.float64)
    found = {}
    for form in ("block", "relu"):
        for memory in MODES:
            options = {"form": form, "memory": memory, "velocity": velocity, "fraction_bits": 40}
            found[form, memory] = grads(rg.convert(copy.deepcopy(model), **options), x)
    for (form, memory), now in found.items():
        assert all(torch.equal(a, b) for a, b in zip(found[form, "store"], now, strict=True)), (form, memory)
    ours, theirs = found["relu", "store"], found["block", "store"]
    assert torch.equal(ours[0], theirs[0])
    assert all((a - b).norm() <= 1e-11 * b.norm() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("used", [[1], [2], [0, 3], [1, 2, 3], [3]])
def test_gradients_that_come_in_between(used: list[int]) -> None:
    """A loss of some blocks' outputs: gradients begin in the middle of the stage, and are joined on the way."""
    model, x, found = thin_resnet(26).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64), {}
    for form in ("block", "relu"):
        for memory in MODES:
            mine = rg.convert(copy.deepcopy(model), form=form, memory=memory, fraction_bits=40)
            (stage, *_), outputs = stages_of(mine), list[Tensor]()
            blocks = [
                block for path, block in mine.named_modules() if path.rpartition(".")[0] == stage.name.split(".")[0]
            ]
            for k in used:
                blocks[k].register_forward_hook(lambda m, a, y, to=outputs: to.append(y))
            leaf = x.clone().requires_grad_()
            mine(leaf)
            loss = sum(y.square().mean() for y in outputs)
            wanted = [leaf, *(p for block in blocks[: used[-1] + 1] for p in block.parameters())]
            found[form, memory] = torch.autograd.grad(loss, wanted, allow_unused=True)
    for (form, memory), now in found.items():
        for a, b, c in zip(now, found[form, "store"], found["block", "store"], strict=True):
            assert torch.equal(a, b), (form, memory)
            assert (a - c).norm() <= 1e-11 * c.norm()


def test_the_blocks_add_nothing_themselves_unless_gamma_is_zero() -> None:
    model, called = torchvision_resnet(), []
    model.layer1[1].relu.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match=r"layer1\.1, a torchvision.* the last one without hooks"):
        rg.convert(model, form="relu")
    model.layer1[1].relu._forward_hooks.clear()
    rg.convert(model, form="relu", memory="store")
    x = torch.randn(2, 3, 32, 32)
    model(x)
    model.layer1[1].relu.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ValueError, match="without hooks"):
        model(x)
    for stage in stages_of(model):
        stage.gamma = 0
    model(x)
    assert len(called) == 3  # of a Bottleneck, all


def test_it_comes_back() -> None:
    model, x = torchvision_resnet().eval(), torch.randn(2, 3, 32, 32)
    before = model(x)
    rg.convert(model, form="relu")
    assert not torch.equal(model(x), before)
    assert torch.equal(rg.revert(model)(x), before)


def test_a_budget_and_a_plan() -> None:
    model, x = resnet(18, size="cifar", classes=3), torch.randn(2, 3, 16, 16)
    table = rg.plan(model, x, form="relu")
    assert {row.form for row in table.stages} == {"relu"}
    wanted = grads(rg.convert(copy.deepcopy(model), form="relu", fraction_bits=18, memory="store"), x)
    found = grads(rg.convert(copy.deepcopy(model), form="relu", fraction_bits=18, memory=10**9), x)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_other_blocks_are_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    with pytest.raises(ValueError, match=r"TransformerEncoderLayer, is not known .* Use form='block'"):
        rg.convert(encoder, form="relu")

    class Other(type(torchvision_resnet().layer1[0])):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = torchvision_resnet()
    model.layer1[1].__class__ = Other
    with pytest.raises(ValueError, match=r"Other, is not known"):
        rg.convert(model, form="relu", stages=["layer1.[12]"])
    model.layer1[1].__class__ = Other.__base__
    model.layer1[1].relu = nn.ReLU6()
    with pytest.raises(ValueError, match=r"layer1\.1, .* and a plain nn\.ReLU"):
        rg.convert(model, form="relu")
