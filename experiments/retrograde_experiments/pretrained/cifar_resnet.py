"""The ResNets of the CIFAR-10 weights by Y. Idelbayev: basic blocks, and shortcuts without parameters.

Where a stage halves the image and doubles the channels, the shortcut takes every other pixel and adds channels of zeros
("option A" of He et al., 2016). Parameters are named as in the published files, less their `module.`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """relu(shortcut(x) + f(x)); without a stride it keeps the shape of x."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1 or self.more:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return torch.relu(x + y)


class CifarResNet(nn.Module):
    """Depth 6n + 2: a 3×3 convolution, three stages of n blocks, a linear layer.

    >>> CifarResNet(20)(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"depth must be 6n + 2 with n of at least 1: 8, 14, 20, … 56; got {depth}.")
        self.conv1, self.bn1 = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTHS[0])
        for k, width in enumerate(WIDTHS):
            before = WIDTHS[max(k - 1, 0)]
            first = Block(before, width, 2 if k else 1)
            rest_of_it = [Block(width, width, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{k + 1}", nn.Sequential(first, *rest_of_it))
        self.linear = nn.Linear(WIDTHS[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for k in range(len(WIDTHS)):
            x = self.get_submodule(f"layer{k + 1}")(x)
        return self.linear(x.mean((2, 3)))
