"""Networks by name, for images of ImageNet's size or of CIFAR's and below.

    resnet101         18, 34, 50, 101, 152          four stages
    thin-resnet110    6n + 2 or 9n + 2              three thin stages, small images only; thin-resnet56x2: twice as wide
    revnet101         as many parameters as the resnet of that name

γ = 0 with memory="store" is the plain ResNet, its code and all; γ = 0 with another mode runs it block by block.
residual="branch" is the form of the paper's published code: nothing follows the addition, the first block of a stage is plain, and
γ = 1 is taken literally, so that f has the factor 1 − γ = 0.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from retrograde.nets.resnet import resnet, thin_resnet
from retrograde.nets.revnet import rev_resnet

from ..errors import ExperimentError
from ..private import momentum_options

FORMS = {"branch": "nothing after the addition", "relu": "a ReLU after the addition"}
VELOCITIES = {"zero": None, "first": "first", "learned": "learned"}


def build(
    name: str, *, classes: int, channels: int = 3, size: str = "cifar", gamma: float = 0.9, velocity: str = "zero",
    memory: str = "auto", verify: str = "auto", overflow: str = "raise", fixed_point: str = "auto",
    residual: str = "relu",
) -> nn.Module:  # fmt: skip
    """The network of that name.

    Args:
        name: see above.
        classes, channels: of the images.
        size: "cifar" or "imagenet".
        gamma: γ; a RevNet has none.
        velocity: v₀: "zero"; "first", f(x₀) of each stage's first block; "learned", of a block of its own.
        memory, verify, overflow: as in `MomentumNet`.
        fixed_point: "auto" or "int16"; a RevNet has none.
        residual: "relu" or "branch", see above; a RevNet has neither.
    """
    match = re.fullmatch(r"(resnet|thin-resnet|revnet)(\d+)(?:(?<=\d)x([1-9]\d?))?", name)
    if match is not None and match[3] and match[1] != "thin-resnet":
        raise ExperimentError(f"{name}: a width can be given for thin-resnets only, as in thin-resnet56x2.")
    if match is None or velocity not in VELOCITIES:
        given = f"network {name!r}" if match is None else f"velocity {velocity!r}"
        raise ExperimentError(
            f"there is no {given}. Networks: resnet101, thin-resnet110, revnet101; velocities: {', '.join(VELOCITIES)}."
        )
    kind, depth = match[1], int(match[2])
    options: dict[str, Any] = {"overflow": overflow, **momentum_options(memory, fixed_point, verify)}
    if kind == "revnet" and fixed_point != "auto":
        raise ExperimentError(
            f"fixed_point={fixed_point} is for momentum networks; {name} holds its streams in 32 bits."
        )
    momentum = {"gamma": gamma, "velocity": VELOCITIES[velocity], **options}
    momentum |= {"factor": 0.0} if residual == "branch" and gamma == 1 else {}
    momentum = {} if gamma == 0 and memory == "store" else momentum
    momentum["residual"] = residual
    try:
        if kind == "revnet":
            net: nn.Module = rev_resnet(depth, size=size, classes=classes, **options)
        elif kind == "resnet":
            net = resnet(depth, size=size, classes=classes, **momentum)
        else:
            net = thin_resnet(depth, width=16 * int(match[3] or 1), classes=classes, **momentum)
    except ValueError as error:
        raise ExperimentError(f"{name} cannot be built: {error}") from error
    if channels != 3:
        first: Any = net.conv1
        net.conv1 = nn.Conv2d(channels, first.out_channels, first.kernel_size, first.stride, first.padding, bias=False)
    return net
