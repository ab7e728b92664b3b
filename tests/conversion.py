"""One training step of a model, as everything that it leaves behind, and what a model is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from problems import assert_same_bits
from retrograde.convert.block import place_of

MODES = ("store", "reverse", "checkpoint")


def step(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Output, gradients, buffers and the next random number of a training step from a fixed random state. Gradients are
    cleared and buffers put back afterwards, so that the next step begins where this one did."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    torch.manual_seed(7)
    y = call(model)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    found = {"output": y.detach(), "next random": torch.rand(1)}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    model.zero_grad()
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    return found


def converted_in(
    modes: Sequence[str], model: nn.Module, call: Callable[[nn.Module], Tensor], example: Any = None, **options: Any
) -> dict[str, Tensor]:
    """What a step of the model gives, converted to each of these modes with the same bits. It is put back afterwards."""
    found = {}
    for mode in modes:
        found[mode] = step(rg.convert(model, example, memory=mode, **options), call)
        rg.revert(model)
        assert_same_bits(found[modes[0]], found[mode])
    return found[modes[0]]


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """`block.compile(**options)` of every step of a stage."""
    for module in model.modules():
        place = place_of(module)
        if place is not None and not place.stage.checkpointed:
            module.compile(**options)


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Classes, attributes, hooks, parameters and values of a model: what `convert` must leave alone when it fails."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = {
            key: len(value) for key, value in module.__dict__.items() if "hooks" in key and hasattr(value, "__len__")
        }
        found[path] = (type(module), sorted(module.__dict__), own, module.training)
    found["parameters"] = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    return found
