"""`IRevNet`: couplings and invertible down-sampling, from the pixels to the last features [jacobsen2018].

    x ← squeeze(image)      v, x ← halves(x)      (v ← v + f(x)   x ← x + f(v))*   squeeze   (…)*   squeeze   …

Every operation before the classifier permutes or adds integers, so `inverse` returns the image from the last features, bit
for bit. The image is held as fixed point: pixels k/256 exactly, other floats rounded to `fixed_point.bits` digits after the point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from ..reverse.coupling import squeeze, unsqueeze
from .checks import check_input, whole
from .coupling import CoupledState, CouplingNet


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
