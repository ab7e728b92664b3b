"""Real images that ship with scikit-learn, and a small residual network for them.

    x ← stem(image)      x ← x + f_k(x), k = 1…depth      class ← head(x)        f = conv-bn-relu-conv-bn

1,797 handwritten digits, 8×8 pixels in 17 grey levels: small enough to train on a laptop in a minute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


@dataclass(frozen=True)
class Digits:
    """Images (count, 1, 8, 8) in [0, 1] and their labels, for training and for testing."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits(seed: int) -> Digits:
    """The digits, one in five set aside for testing."""
    from sklearn.datasets import load_digits as bundled

    data = bundled()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([len(x) // 5])
    return Digits(x[train], y[train], x[test], y[test])


class Residual(nn.Module):
    """x ← x + f(x) for each block, keeping every activation."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Checkpointed(Residual):
    """The same, keeping each block's input and running the block again for its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), _norm(), nn.ReLU())


def branch() -> nn.Module:
    """f = conv-bn-relu-conv-bn, begun small so that a deep stack of them trains from the first step."""
    last = _norm()
    nn.init.constant_(last.weight, 0.2)
    return nn.Sequential(_conv(), _norm(), nn.ReLU(), _conv(), last)


def head() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 10))


def _conv() -> nn.Conv2d:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)


def _norm() -> nn.BatchNorm2d:
    # A short memory: an epoch has few steps, and the statistics for evaluation must keep up with the weights.
    return nn.BatchNorm2d(WIDTH, momentum=0.3)
