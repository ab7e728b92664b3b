"""Inputs: extra ones, odd ones, and writing to them."""

from __future__ import annotations

from typing import Any

import torch
from hazard_blocks import CHANNELS, WIDTH, Function, Mlp, batch, conv, image, mlps, tokens
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "inputs"


class Taking(Mlp):
    """A block that takes more than x."""

    def forward(
        self, x: Tensor, memory: Any = None, *, scale: Any = None, how: str = "add", mask: Tensor | None = None
    ) -> Tensor:
        y = super().forward(x)
        if isinstance(memory, dict):
            memory = memory["pair"][0] + memory["pair"][1]
        if memory is not None:
            y = y + torch.tanh(memory) if how == "add" else y * torch.tanh(memory)
        y = y if mask is None else y.masked_fill(mask, 0.0)
        return y if scale is None else y * scale


def _taking() -> list[nn.Module]:
    return [Taking() for _ in range(4)]


@hazard(THEME)
def extra_input(h: Setting) -> Found:
    """an extra tensor without gradient"""
    return step(h.net(_taking()), batch(), torch.randn(3, WIDTH))


@hazard(THEME)
def extra_input_with_gradient(h: Setting) -> Found:
    """an extra tensor with a gradient (encoder memory)"""
    return step(h.net(_taking()), batch(), torch.randn(3, WIDTH, requires_grad=True))


@hazard(THEME)
def extra_input_not_a_leaf(h: Setting) -> Found:
    """an extra tensor that is computed, so that gradients flow on through it"""
    net, leaf = h.net(_taking()), torch.randn(3, WIDTH, requires_grad=True)
    square(net(batch(), leaf.sin() * 2)).backward()
    return collect(net, gradient_of_leaf=torch.zeros(()) if leaf.grad is None else leaf.grad)


@hazard(THEME)
def keyword_with_gradient(h: Setting) -> Found:
    """a keyword argument with a gradient"""
    net, scale = h.net(_taking()), torch.full((WIDTH,), 2.0, requires_grad=True)
    square(net(batch(), scale=scale)).backward()
    return collect(net, gradient_of_scale=torch.zeros(()) if scale.grad is None else scale.grad)


@hazard(THEME)
def none_argument(h: Setting) -> Found:
    """None as an argument"""
    return step(h.net(_taking()), batch(), None)


@hazard(THEME)
def boolean_mask(h: Setting) -> Found:
    """a boolean mask by keyword"""
    return step(h.net(_taking()), batch(), mask=torch.eye(3, WIDTH).bool())


@hazard(THEME)
def nested_containers(h: Setting) -> Found:
    """a dict with a list of tensors, one of which needs a gradient"""
    net, leaf = h.net(_taking()), torch.randn(3, WIDTH, requires_grad=True)
    square(net(batch(), {"pair": [leaf, torch.ones(WIDTH)]})).backward()
    return collect(net, gradient_of_leaf=torch.zeros(()) if leaf.grad is None else leaf.grad)


@hazard(THEME)
def list_given_and_appended_to(h: Setting) -> Found:
    """a list passed to every block, which appends to it and reads what others put there"""

    class Appending(Mlp):
        def forward(self, x: Tensor, features: list[Tensor]) -> Tensor:  # type: ignore[override]
            f = super().forward(x)
            features.append(f)
            return f + 0.1 * sum(features)

    net, x, features = h.net([Appending() for _ in range(4)]), batch(), list[Tensor]()
    (square(net(x, features)) + sum(f.mean() for f in features)).backward()
    return collect(net, count=torch.tensor(float(len(features))))


@hazard(THEME)
def arguments_that_are_no_tensors(h: Setting) -> Found:
    """a float and a string as arguments"""
    return step(h.net(_taking()), batch(), torch.ones(3, WIDTH), scale=0.5, how="times")


@hazard(THEME, undisturbed=True)
def extra_input_written_between(h: Setting) -> Found:
    """an extra tensor changed in place between forward and backward"""
    memory = torch.randn(3, WIDTH)
    return step(h.net(_taking()), batch(), memory, scale=2.0, between=lambda: memory.mul_(5) if h.disturbed else None)


@hazard(THEME, undisturbed=True)
def input_written_between(h: Setting) -> Found:
    """the input changed in place between forward and backward"""
    x = batch().detach()
    return step(h.net(mlps(4)), x, between=lambda: x.mul_(5) if h.disturbed else None)


@hazard(THEME)
def output_written_after(h: Setting) -> Found:
    """the output changed in place before the loss"""
    return step(h.net(mlps(4)), batch(), loss=lambda y: square(y.mul_(2).add_(1)))


@hazard(THEME)
def in_place_first_operation(h: Setting) -> Found:
    """a block whose first operation is in place (the input is its own copy)"""
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return step(h.net(blocks), batch() * 1.0)


@hazard(THEME, undisturbed=True)
def in_place_on_saved_tensor(h: Setting) -> Found:
    """an in-place operation on a tensor saved for backward, which plain autograd refuses"""

    def overwrite(x: Tensor) -> Tensor:
        y = torch.exp(x * 0.1)
        return y.add_(1) if h.disturbed else y + 1

    return step(h.net([nn.Sequential(Mlp(), Function(overwrite)) for _ in range(4)]), batch())


@hazard(THEME)
def in_place_after_linear(h: Setting) -> Found:
    """in-place activations inside a block"""
    blocks = [nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(inplace=True), nn.Linear(12, WIDTH)) for _ in range(4)]
    return step(h.net(blocks), batch())


@hazard(THEME)
def not_contiguous(h: Setting) -> Found:
    """a transposed input"""
    x = torch.randn(WIDTH, 5).t().requires_grad_()
    return step(h.net(mlps(4)), x)


@hazard(THEME)
def expanded(h: Setting) -> Found:
    """an expanded input (one row, five times)"""
    return step(h.net(mlps(4)), torch.randn(1, WIDTH).expand(5, WIDTH).requires_grad_())


@hazard(THEME)
def channels_last(h: Setting) -> Found:
    """channels_last images"""
    x = image().detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    return step(h.net([conv(nn.BatchNorm2d(CHANNELS)) for _ in range(4)], dim=1), x)


@hazard(THEME)
def blocks_return_other_strides(h: Setting) -> Found:
    """blocks that return transposed memory"""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)

    return step(h.net([Mix() for _ in range(4)]), tokens())


@hazard(THEME)
def empty_batch(h: Setting) -> Found:
    """a batch of no rows"""
    return step(h.net(mlps(4)), torch.randn(0, WIDTH).requires_grad_(), loss=lambda y: y.sum())


@hazard(THEME)
def no_dimensions(h: Setting) -> Found:
    """a scalar tensor"""
    return step(h.net([Function(torch.sin) for _ in range(4)]), torch.tensor(0.5, requires_grad=True))


@hazard(THEME)
def complex_numbers(h: Setting) -> Found:
    """complex tensors"""
    blocks = [nn.Linear(WIDTH, WIDTH, dtype=torch.complex64) for _ in range(4)]
    x = torch.randn(3, WIDTH, dtype=torch.complex64, requires_grad=True)
    return step(h.net(list(blocks)), x, loss=lambda y: y.abs().mean())


@hazard(THEME)
def padding_mask(h: Setting) -> Found:
    """attention under a causal mask with −∞"""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.full((5, 5), float("-inf")).triu(1)
    return step(h.net([Masked() for _ in range(4)]), tokens(), mask)


@hazard(THEME)
def inference_mode_then_training(h: Setting) -> Found:
    """a pass in inference_mode first, then training"""
    net = h.net([nn.Sequential(nn.LayerNorm(WIDTH), Mlp()) for _ in range(4)])
    with torch.inference_mode():
        net(batch())
    return step(net, batch())


@hazard(THEME)
def input_made_in_inference_mode(h: Setting) -> Found:
    """an input that was made in inference_mode"""
    with torch.inference_mode():
        x = torch.randn(3, WIDTH)
    return step(h.net(mlps(4)), x.clone().requires_grad_())


@hazard(THEME)
def block_changes_shape(h: Setting) -> Found:
    """a block whose output has another shape, and broadcasts"""
    blocks = mlps(4)
    blocks[2] = nn.Sequential(Mlp(), Function(lambda y: y.mean(0, keepdim=True)))
    return step(h.net(blocks), batch())
