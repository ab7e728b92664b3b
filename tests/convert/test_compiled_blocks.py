"""`block.compile()` of converted blocks: blocks through the compiler, the bits of stored activations, and like blocks compiled once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from conversion import compile_blocks
from retrograde.extras import require

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # the compiler looks at it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of its own imports
]


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 5, 16)


def images() -> tuple[nn.Module, Tensor]:
    models = require("torchvision.models")
    return models.ResNet(models.resnet.BasicBlock, [3, 5, 1, 1], num_classes=4), torch.randn(2, 3, 32, 32)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("make", [encoder, images])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bits_of_store_and_nothing_compiled_twice(make: Callable[[], Any], backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = make()
    weights, found = {k: v.clone() for k, v in model.state_dict().items()}, {}
    start, blocks = compiled_frames(), 0
    for memory in ("store", "reverse"):
        model.load_state_dict(weights)
        rg.convert(model, memory=memory, fixed_point=rg.FixedPoint(20, torch.int32), verify="strict")
        compile_blocks(model, backend=backend)
        found[memory] = step(model, x)
        before = compiled_frames()
        step(model, x)
        assert compiled_frames() == before
        blocks = sum("momentum" in module.extra_repr() for module in model.modules())
        rg.revert(model)
    assert 0 < compiled_frames() - start < blocks
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


def compiled_frames() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_an_option_that_the_compiler_does_not_have() -> None:
    model, x = encoder()
    rg.convert(model)
    with pytest.raises(TypeError, match="speed"):
        model.layers[0].compile(speed=2)
    step(model, x)


def test_the_block_itself_is_compiled_whole() -> None:
    """torchtitan compiles layers so, after it has asked for their checkpointing."""
    model, x = encoder()
    rg.convert(model)
    expected, before = step(model, x), compiled_frames()
    for layer in model.layers:
        layer.compile(backend="eager", fullgraph=True)
    found = step(model, x)
    assert compiled_frames() > before
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    rg.revert(model)
    assert type(model.layers[0]) is nn.TransformerEncoderLayer
    model(x).sum().backward()
