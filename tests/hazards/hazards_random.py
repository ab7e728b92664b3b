"""Random numbers, in and around a block."""

from __future__ import annotations

import random

import numpy as np
import torch
from hazard_blocks import WIDTH, Attention, Function, Mlp, Own, batch, dense, several, then, tokens
from hazard_registry import Found, Theme, square, step
from torch import Tensor, nn
from torch.nn import functional as F


def dropping(depth: int = 4) -> list[nn.Module]:
    return several(lambda: dense(nn.Dropout(0.5)), depth)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.5)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return F.dropout(x, 0.5)


def by_numpy(x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.random.rand(WIDTH)).float()  # noqa: NPY002


class RandomNumbers(Theme):
    theme = "random numbers"

    def dropout(self) -> Found:
        """dropout"""
        return self.step(dropping(6))

    def attention_dropout(self) -> Found:
        """attention with dropout on its weights"""
        return self.step(several(lambda: Attention(0.3)), tokens())

    def random_control_flow(self) -> Found:
        """stochastic depth: torch.rand decides whether a block runs"""
        return self.step(several(lambda: then(lambda x: x if torch.rand(()) < 0.5 else x.sin()), 6))

    def random_numbers_drawn_between(self) -> Found:
        """random numbers drawn between forward and backward"""
        return self.step(dropping(), between=lambda: torch.rand(100))

    def seed_set_between(self) -> Found:
        """torch.manual_seed between forward and backward"""
        return self.step(dropping(), between=lambda: torch.manual_seed(5))

    def seed_set_inside(self) -> Found:
        """torch.manual_seed inside a block"""
        return self.step([dense(Function(seeded)), dense(nn.Dropout(0.5)), dense(Function(seeded)), Mlp()])

    def forked_generator(self) -> Found:
        """torch.random.fork_rng inside a block"""
        return self.step(several(lambda: dense(Function(forked))))

    def generator_given(self) -> Found:
        """a torch.Generator given as an extra input"""
        blocks = several(lambda: Own(lambda block, x, given: block.f(x) * torch.rand(WIDTH, generator=given)))
        return self.step(blocks, batch(), torch.Generator().manual_seed(1))

    def generator_held(self) -> Found:
        """a torch.Generator that the block holds"""
        held = torch.Generator().manual_seed(1)
        return self.step(several(lambda: dense(Function(lambda x: x * torch.rand(WIDTH, generator=held)))))

    def numpy_random(self) -> Found:
        """NumPy's random numbers inside a block"""
        return self.step(several(lambda: dense(Function(by_numpy))))

    def python_random(self) -> Found:
        """Python's random numbers inside a block"""
        return self.step(several(lambda: dense(Function(lambda x: x * random.random()))))

    def stream_afterwards(self) -> Found:
        """the random stream after the step, over three steps"""
        net, found = self.net(dropping()), {}
        for k in range(3):
            net(batch()).square().mean().backward()
            found[f"random {k}"] = torch.rand(3)
        return found

    def two_steps_before_backward(self) -> Found:
        """dropout, two forward passes before their backward passes"""
        net = self.net(dropping())
        a, b = net(batch()), net(batch())
        square(a).backward()
        return step(net, loss=lambda y: square(y) + square(b))
