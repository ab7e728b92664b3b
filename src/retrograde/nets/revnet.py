"""`RevNet`: two streams, two functions per layer [gomez2017; sander2021, eq. 4].

    v ← v + φ(x)        x ← x + ψ(v)
    x ← x − ψ(v)        v ← v − φ(x)

v is the first half of the channels and x the second. A RevNet is a `CouplingNet`, so gradients have the bits of stored
activations. Unlike a Momentum ResNet it needs two functions per layer on half of the channels, so it does not take a ResNet's
parameters, and its fixed points never attract [sander2021, Prop. 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from .checks import modules
from .coupling import CouplingNet
from .resnet import BasicBlock, ResNet, resnet


class RevNet(CouplingNet):
    """A stack of pairs (φ, ψ) as a reversible network.

    Args:
        phi: modules φ of x, whose output is added to v.
        psi: modules ψ of v, whose output is added to x; as many.
        options: `dim`, `memory`, `fixed_point`, `verify`, `overflow`, as in `CouplingNet`.

    `blocks[2 * k]` is φ_k and `blocks[2 * k + 1]` is ψ_k.

    Shape:
        x: a floating-point tensor with an even size along `dim` (1 unless told); so is the output.

    >>> import torch
    >>> net = RevNet([nn.Linear(2, 2) for _ in range(5)], [nn.Linear(2, 2) for _ in range(5)], memory="reverse")
    >>> net(torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(self, phi: Iterable[nn.Module], psi: Iterable[nn.Module], **options: Any) -> None:
        phi, psi = modules(phi), modules(psi)
        if len(phi) != len(psi):
            raise ValueError(f"a RevNet needs as many psi as phi; got {len(phi)} phi and {len(psi)} psi.")
        super().__init__([block for pair in zip(phi, psi, strict=True) for block in pair], **options)

    @classmethod
    def matching(
        cls, blocks: Iterable[nn.Module], half: Callable[[], nn.Module], **options: Any
    ) -> tuple[RevNet, float]:
        """A RevNet with the parameters of a residual stack, as nearly as whole layers allow.

        Args:
            blocks: the blocks of the residual network to match.
            half: makes one φ or ψ.

        Returns:
            The network, and its number of parameters relative to that of `blocks`.
        """
        wanted, one = parameters(*modules(blocks)), parameters(half())
        if not wanted or not one:
            raise ValueError(f"the blocks have {wanted} parameters and a half has {one}; both must have some to match.")
        depth = max(1, round(wanted / (2 * one)))
        net = cls([half() for _ in range(depth)], [half() for _ in range(depth)], **options)
        return net, parameters(net) / wanted


def parameters(*nets: nn.Module) -> int:
    """How many parameters the networks have, shared ones counted once."""
    return sum(p.numel() for p in nn.ModuleList(nets).parameters())


def rev_resnet(depth: int, *, size: str = "imagenet", classes: int | None = None, **options: Any) -> ResNet:
    """A RevNet with the parameters of ResNet-`depth`, stage by stage, to 1 %.

    The blocks that change the shape stay. Those that keep it become a `RevNet` on two halves of the channels. The number of pairs
    of φ and ψ is the one that comes nearest at the inner width of the blocks; then the inner width is adjusted.

    Args:
        depth, size, classes: as in `resnet`.
        options: as in `RevNet`.
    """
    net = resnet(depth, size=size, classes=classes)
    for i, stage in enumerate(net.stages()):
        kept: list[Any] = [block for block in stage if block.downsample is None]
        changing = [block for block in stage if block.downsample is not None]
        channels, width = kept[0].conv1.in_channels // 2, kept[0].conv1.out_channels
        kernels = (3, 3) if isinstance(kept[0], BasicBlock) else (1, 3, 1)
        wanted = parameters(*kept)
        pairs = max(1, round(wanted / (2 * _size(channels, width, kernels))))
        width = min(range(1, 4 * width), key=lambda w: abs(2 * pairs * _size(channels, w, kernels) - wanted))
        phi, psi = ([half(channels, width, kernels) for _ in range(pairs)] for _ in range(2))
        net.add_module(f"layer{i + 1}", nn.Sequential(*changing, RevNet(phi, psi, **options)))
    return net


def half(channels: int, width: int, kernels: tuple[int, ...]) -> nn.Sequential:
    """φ or ψ: the branch of a residual block, ending in a normalisation."""
    layers: list[nn.Module] = []
    for c, w, kernel in _layers(channels, width, kernels):
        layers += [nn.Conv2d(c, w, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(w), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _layers(channels: int, width: int, kernels: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    sizes = [channels] + [width] * (len(kernels) - 1) + [channels]
    yield from zip(sizes[:-1], sizes[1:], kernels, strict=True)


def _size(channels: int, width: int, kernels: tuple[int, ...]) -> int:
    """Parameters of `half`."""
    return sum(c * w * kernel**2 + 2 * w for c, w, kernel in _layers(channels, width, kernels))
