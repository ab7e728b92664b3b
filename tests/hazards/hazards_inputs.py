"""Inputs: extra ones, odd ones, and writing to them."""

from __future__ import annotations

from typing import Any

import torch
from hazard_blocks import CHANNELS, WIDTH, Function, Mlp, Own, batch, conv, mlps, several, then, tokens
from hazard_blocks import image as images
from hazard_registry import Found, Theme, collect, given, square, step, undisturbed
from torch import Tensor, nn
from torch.nn import functional as F


def taking(
    block: Own, x: Tensor, memory: Any = None, *, scale: Any = None, how: str = "add", mask: Tensor | None = None
) -> Tensor:
    """A block that takes more than x."""
    y = block.f(x)
    if isinstance(memory, dict):
        memory = memory["pair"][0] + memory["pair"][1]
    if memory is not None:
        y = y + torch.tanh(memory) if how == "add" else y * torch.tanh(memory)
    y = y if mask is None else y.masked_fill(mask, 0.0)
    return y if scale is None else y * scale


def appending(block: Own, x: Tensor, features: list[Tensor]) -> Tensor:
    features.append(block.f(x))
    return features[-1] + 0.1 * sum(features)


class Mix(nn.Module):
    """Mixes along the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def takers() -> list[nn.Module]:
    return several(lambda: Own(taking))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Inputs(Theme):
    theme = "inputs"

    def extra_input(self) -> Found:
        """an extra tensor without gradient"""
        return self.step(takers(), batch(), torch.randn(3, WIDTH))

    def extra_input_with_gradient(self) -> Found:
        """an extra tensor with a gradient (encoder memory)"""
        return self.step(takers(), batch(), leaf(3, WIDTH))

    def extra_input_not_a_leaf(self) -> Found:
        """an extra tensor that is computed, so that gradients flow on through it"""
        net, memory = self.net(takers()), leaf(3, WIDTH)
        square(net(batch(), memory.sin() * 2)).backward()
        return collect(net, gradient_of_leaf=given(memory))

    def keyword_with_gradient(self) -> Found:
        """a keyword argument with a gradient"""
        net, scale = self.net(takers()), torch.full((WIDTH,), 2.0, requires_grad=True)
        square(net(batch(), scale=scale)).backward()
        return collect(net, gradient_of_scale=given(scale))

    def none_argument(self) -> Found:
        """None as an argument"""
        return self.step(takers(), batch(), None)

    def boolean_mask(self) -> Found:
        """a boolean mask by keyword"""
        return self.step(takers(), batch(), mask=torch.eye(3, WIDTH).bool())

    def nested_containers(self) -> Found:
        """a dict with a list of tensors, one of which needs a gradient"""
        net, memory = self.net(takers()), leaf(3, WIDTH)
        square(net(batch(), {"pair": [memory, torch.ones(WIDTH)]})).backward()
        return collect(net, gradient_of_leaf=given(memory))

    def list_given_and_appended_to(self) -> Found:
        """a list passed to every block, which appends to it and reads what others put there"""
        net, x, features = self.net(several(lambda: Own(appending))), batch(), list[Tensor]()
        (square(net(x, features)) + sum(f.mean() for f in features)).backward()
        return collect(net, count=torch.tensor(float(len(features))))

    def arguments_that_are_no_tensors(self) -> Found:
        """a float and a string as arguments"""
        return self.step(takers(), batch(), torch.ones(3, WIDTH), scale=0.5, how="times")

    @undisturbed
    def extra_input_written_between(self) -> Found:
        """an extra tensor changed in place between forward and backward"""
        memory = torch.randn(3, WIDTH)
        write = lambda: memory.mul_(5) if self.disturbed else None  # noqa: E731
        return self.step(takers(), batch(), memory, scale=2.0, between=write)

    @undisturbed
    def input_written_between(self) -> Found:
        """the input changed in place between forward and backward"""
        x = batch().detach()
        return self.step(mlps(), x, between=lambda: x.mul_(5) if self.disturbed else None)

    def output_written_after(self) -> Found:
        """the output changed in place before the loss"""
        return self.step(mlps(), loss=lambda y: square(y.mul_(2).add_(1)))

    def in_place_first_operation(self) -> Found:
        """a block whose first operation is in place (the input is its own copy)"""
        blocks = several(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
        return self.step(blocks, batch() * 1.0)

    @undisturbed
    def in_place_on_saved_tensor(self) -> Found:
        """an in-place operation on a tensor saved for backward, which plain autograd refuses"""

        def overwrite(x: Tensor) -> Tensor:
            y = torch.exp(x * 0.1)
            return y.add_(1) if self.disturbed else y + 1

        return self.step(several(lambda: then(overwrite)))

    def in_place_after_linear(self) -> Found:
        """in-place activations inside a block"""
        layers = lambda: (nn.Linear(WIDTH, 12), nn.ReLU(inplace=True), nn.Linear(12, WIDTH))  # noqa: E731
        return self.step(several(lambda: nn.Sequential(*layers())))

    def not_contiguous(self) -> Found:
        """a transposed input"""
        return self.step(mlps(), torch.randn(WIDTH, 5).t().requires_grad_())

    def expanded(self) -> Found:
        """an expanded input (one row, five times)"""
        return self.step(mlps(), torch.randn(1, WIDTH).expand(5, WIDTH).requires_grad_())

    def channels_last(self) -> Found:
        """channels_last images"""
        x = images().detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        return self.step(several(lambda: conv(nn.BatchNorm2d(CHANNELS))), x, net={"dim": 1})

    def blocks_return_other_strides(self) -> Found:
        """blocks that return transposed memory"""
        return self.step(several(Mix), tokens())

    def empty_batch(self) -> Found:
        """a batch of no rows"""
        return self.step(mlps(), leaf(0, WIDTH), loss=lambda y: y.sum())

    def no_dimensions(self) -> Found:
        """a scalar tensor"""
        return self.step(several(lambda: Function(torch.sin)), torch.tensor(0.5, requires_grad=True))

    def complex_numbers(self) -> Found:
        """complex tensors"""
        x = torch.randn(3, WIDTH, dtype=torch.complex64, requires_grad=True)
        blocks = several(lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex64))
        return self.step(blocks, x, loss=lambda y: y.abs().mean())

    def padding_mask(self) -> Found:
        """attention under a causal mask with −∞"""
        return self.step(several(Masked), tokens(), torch.full((5, 5), float("-inf")).triu(1))

    def inference_mode_then_training(self) -> Found:
        """a pass in inference_mode first, then training"""
        net = self.net(several(lambda: nn.Sequential(nn.LayerNorm(WIDTH), Mlp())))
        with torch.inference_mode():
            net(batch())
        return step(net)

    def input_made_in_inference_mode(self) -> Found:
        """an input that was made in inference_mode"""
        with torch.inference_mode():
            x = torch.randn(3, WIDTH)
        return self.step(mlps(), x.clone().requires_grad_())

    def block_changes_shape(self) -> Found:
        """a block whose output has another shape, and broadcasts"""
        blocks = mlps()
        blocks[2] = then(lambda y: y.mean(0, keepdim=True))
        return self.step(blocks)
