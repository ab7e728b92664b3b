"""RevNets: couplings of two functions per layer, and i-RevNets: couplings from the pixels to the last features.

    v ← v + φ(x)        x ← x + ψ(v)                                                  [gomez2017; sander2021, eq. 4]
    x ← x − ψ(v)        v ← v − φ(x)

v is the first half of the channels and x the second. A `RevNet` is a `CouplingNet`, so gradients have the bits of stored
activations. Unlike a Momentum ResNet it needs two functions per layer on half of the channels, so it does not take a ResNet's
parameters, and its fixed points never attract [sander2021, Prop. 1].

    x ← squeeze(image)      v, x ← halves(x)      (v ← v + f(x)   x ← x + f(v))*   squeeze   (…)*   squeeze   …      [jacobsen2018]

Every operation of an `IRevNet` before the classifier permutes or adds integers, so `inverse` returns the image from the last
features, bit for bit. The image is held as fixed point: pixels k/256 exactly, other floats rounded to `fixed_point.bits` digits after
the point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from ..arithmetic.squeeze import squeeze, unsqueeze
from .checks import check_input, modules, whole
from .coupling import CoupledState, CouplingNet
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
    for (c, w), kernel in zip(_widths(channels, width, kernels), kernels, strict=True):
        layers += [nn.Conv2d(c, w, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(w), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _widths(channels: int, width: int, kernels: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise([channels] + [width] * (len(kernels) - 1) + [channels]))


def _size(channels: int, width: int, kernels: tuple[int, ...]) -> int:
    """Parameters of `half`."""
    return sum(
        c * w * kernel**2 + 2 * w for (c, w), kernel in zip(_widths(channels, width, kernels), kernels, strict=True)
    )


def branch(channels: int, width: int) -> nn.Sequential:
    """norm-relu-conv, twice: one f of an i-RevNet."""
    return nn.Sequential(
        nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, channels, 3, padding=1, bias=False),
    )  # fmt: skip


class IRevNet(nn.Module):
    """An i-RevNet for images.

    Args:
        stages: how many couplings (pairs of f) each stage has; both streams are squeezed by 2 between stages.
        channels: of the images.
        classes: outputs of the classifier.
        first: the squeeze of the image itself.
        padding: channels of zeros added to the squeezed image (an injective i-RevNet); 0 keeps the network bijective.
        squeezed_width: channels inside f, as a fraction of those of its stream.
        options: `memory`, `fixed_point`, `verify`, `overflow`, as in `CouplingNet`.

    Shape:
        image: (N, channels, H, W), with H and W divisible by first · 2^(stages − 1).
        features: (N, (first² · channels + padding) · 4^(stages − 1), H', W').

    >>> import torch
    >>> net = IRevNet([2, 2], channels=3, classes=10).eval()
    >>> image = torch.randint(256, (2, 3, 8, 8)) / 256
    >>> torch.equal(net.inverse(net.encode(image)), image)
    True
    """

    def __init__(
        self, stages: Sequence[int], *, channels: int = 3, classes: int = 10, first: int = 2, padding: int = 0,
        squeezed_width: float = 1.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if not stages:
            raise ValueError("stages is empty: an i-RevNet needs at least one stage.")
        self.first, self.padding, self.channels = whole("first", first), whole("padding", padding, 0), channels
        width = whole("channels", channels) * first**2 + padding
        if width % 2:
            raise ValueError(
                f"{channels} channels squeezed by {first} and padded with {padding} are {width}, which is odd: a coupling "
                "splits them in two. Pass another padding, or first=2."
            )
        blocks: list[nn.Module] = []
        squeezes: list[int] = []
        for stage, couplings in enumerate(stages):
            stream = width * 4**stage // 2
            inner = max(1, round(squeezed_width * stream))
            blocks += [branch(stream, inner) for _ in range(2 * whole("stages", couplings))]
            squeezes += [1] * (2 * couplings - 1) + [2]
        squeezes[-1] = 1
        self.couplings = CouplingNet(blocks, squeezes=squeezes, **options)
        out = width * 4 ** (len(stages) - 1)
        self.head = nn.Sequential(nn.BatchNorm2d(out), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(out, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Class scores."""
        return self.classifier(self.head(self.couplings(self._start(image))))

    def encode(self, image: Tensor) -> CoupledState:
        """The last features: `.x` as floats, and the integers from which `inverse` recovers the image bit for bit."""
        return self.couplings.encode(self._start(image))

    def inverse(self, state: CoupledState) -> Tensor:
        """The image from the last features."""
        x = self.couplings.inverse(state)
        return unsqueeze(x[:, : x.shape[1] - self.padding], self.first)

    def _start(self, image: Tensor) -> Tensor:
        check_input(image)
        if image.dim() != 4 or image.shape[1] != self.channels:
            raise ValueError(f"the images must be (N, {self.channels}, H, W); got {tuple(image.shape)}.")
        return pad(squeeze(image, self.first), (0, 0, 0, 0, 0, self.padding))
