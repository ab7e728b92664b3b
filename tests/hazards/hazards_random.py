"""Random numbers, in and around a block."""

from __future__ import annotations

import random

import numpy as np
import torch
from hazard_blocks import WIDTH, Attention, Function, Mlp, batch, tokens
from hazard_registry import Found, Setting, hazard, square, step
from torch import Tensor, nn
from torch.nn import functional as F

THEME = "random numbers"


def _mlp(after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), after)


@hazard(THEME)
def dropout(h: Setting) -> Found:
    """dropout"""
    return step(h.net([_mlp(nn.Dropout(0.5)) for _ in range(6)]), batch())


@hazard(THEME)
def attention_dropout(h: Setting) -> Found:
    """attention with dropout on its weights"""
    return step(h.net([Attention(0.3) for _ in range(4)]), tokens())


@hazard(THEME)
def random_control_flow(h: Setting) -> Found:
    """stochastic depth: torch.rand decides whether a block runs"""

    def skip(x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else x.sin()

    return step(h.net([nn.Sequential(Mlp(), Function(skip)) for _ in range(6)]), batch())


@hazard(THEME)
def random_numbers_drawn_between(h: Setting) -> Found:
    """random numbers drawn between forward and backward"""
    return step(h.net([_mlp(nn.Dropout(0.5)) for _ in range(4)]), batch(), between=lambda: torch.rand(100))


@hazard(THEME)
def seed_set_between(h: Setting) -> Found:
    """torch.manual_seed between forward and backward"""
    return step(h.net([_mlp(nn.Dropout(0.5)) for _ in range(4)]), batch(), between=lambda: torch.manual_seed(5))


@hazard(THEME)
def seed_set_inside(h: Setting) -> Found:
    """torch.manual_seed inside a block"""

    def noisy(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.dropout(x, 0.5)

    return step(h.net([_mlp(Function(noisy)), _mlp(nn.Dropout(0.5)), _mlp(Function(noisy)), Mlp()]), batch())


@hazard(THEME)
def forked_generator(h: Setting) -> Found:
    """torch.random.fork_rng inside a block"""

    def noisy(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return F.dropout(x, 0.5)

    return step(h.net([_mlp(Function(noisy)) for _ in range(4)]), batch())


@hazard(THEME)
def generator_given(h: Setting) -> Found:
    """a torch.Generator given as an extra input"""

    class Noisy(Mlp):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:  # type: ignore[override]
            return super().forward(x) * torch.rand(WIDTH, generator=generator)

    return step(h.net([Noisy() for _ in range(4)]), batch(), torch.Generator().manual_seed(1))


@hazard(THEME)
def generator_held(h: Setting) -> Found:
    """a torch.Generator that the block holds"""
    generator = torch.Generator().manual_seed(1)
    return step(
        h.net([_mlp(Function(lambda x: x * torch.rand(WIDTH, generator=generator))) for _ in range(4)]), batch()
    )


@hazard(THEME)
def numpy_random(h: Setting) -> Found:
    """NumPy's random numbers inside a block"""

    def noisy(x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(WIDTH)).float()  # noqa: NPY002

    return step(h.net([_mlp(Function(noisy)) for _ in range(4)]), batch())


@hazard(THEME)
def python_random(h: Setting) -> Found:
    """Python's random numbers inside a block"""
    return step(h.net([_mlp(Function(lambda x: x * random.random())) for _ in range(4)]), batch())


@hazard(THEME)
def stream_afterwards(h: Setting) -> Found:
    """the random stream after the step, over three steps"""
    net, found = h.net([_mlp(nn.Dropout(0.5)) for _ in range(4)]), {}
    for k in range(3):
        net(batch()).square().mean().backward()
        found[f"random {k}"] = torch.rand(3)
    return found


@hazard(THEME)
def two_steps_before_backward(h: Setting) -> Found:
    """dropout, two forward passes before their backward passes"""
    net = h.net([_mlp(nn.Dropout(0.5)) for _ in range(4)])
    a, b = net(batch()), net(batch())
    square(a).backward()
    return step(net, batch(), loss=lambda y: square(y) + square(b))
