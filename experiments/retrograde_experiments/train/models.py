"""Networks by name, for images of ImageNet's size or of CIFAR's and below.

    resnet101         18, 34, 50, 101, 152          four stages
    thin-resnet110    6n + 2 or 9n + 2              three thin stages, small images only; thin-resnet56x2: twice as wide
    revnet101         as many parameters as the resnet of that name
    torchvision:NAME, timm:NAME, module:function      any other model, through `rg.convert` unless γ = 0 with memory="store"

γ = 0 with memory="store" is the plain ResNet, its code and all; γ = 0 with another mode runs it block by block.
residual="branch" is the form of the paper's published code: nothing follows the addition, the first block of a stage is plain, and
γ = 1 is taken literally, so that f has the factor 1 − γ = 0.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import retrograde as rg
from retrograde.extras import require
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
    if ":" in name:
        raise ExperimentError(f"{name} is not one of this library's networks: `outside` makes it.")
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


def outside(
    name: str, *, classes: int, shape: tuple[int, int, int], gamma: float, velocity: str, memory: str, verify: str, overflow: str,
    fixed_point: str,
) -> nn.Module:  # fmt: skip
    """torchvision:NAME, timm:NAME, or module:function called as function(num_classes=classes); converted by `rg.convert`.

    Args:
        shape: of an image: channels, height, width. The model is tried on two of them.
        gamma, velocity, memory, verify, overflow, fixed_point: as in `build`; there is no velocity "learned".
    """
    where, _, what = name.partition(":")
    try:
        if where == "timm":
            net = require("timm").create_model(what, num_classes=classes, in_chans=shape[0])
        elif where == "torchvision":
            net = require("torchvision").models.get_model(what, num_classes=classes)
        else:
            net = getattr(import_module(where), what)(num_classes=classes)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ExperimentError(f"--model {name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ExperimentError(f"--model {name} gave a {type(net).__name__}; it must give an nn.Module.")
    if gamma == 0 and memory == "store":
        return net
    if velocity == "learned":
        raise ExperimentError(
            "--velocity learned is for the networks of this library; a converted model takes zero or first."
        )
    options = {**momentum_options(memory, fixed_point, verify), "overflow": overflow}
    try:
        return rg.convert(net, torch.zeros(2, *shape), gamma=gamma, velocity=VELOCITIES[velocity], **options)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ExperimentError(f"--model {name} cannot be converted for images of shape {shape}: {error}") from error


def start_from(net: nn.Module, path: Path) -> list[str]:
    """Load weights from a file. Entries of another shape (a head for other classes) are left out; their names.

    Raises:
        ExperimentError: if the file cannot be read, or has none of the network's entries.
    """
    try:
        if path.suffix == ".safetensors":
            found = require("safetensors.torch").load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of either library, many kinds
        raise ExperimentError(f"--init {path}: {type(error).__name__}: {error}") from error
    found = found.get("state_dict", found.get("model", found))
    own = net.state_dict()
    fits = {name: t for name, t in found.items() if name in own and own[name].shape == t.shape}
    if not fits:
        raise ExperimentError(
            f"--init {path} has no entry that fits this model; its first is {next(iter(found), 'missing')!r}."
        )
    net.load_state_dict(fits, strict=False)
    return [name for name in own if name not in fits and not name.endswith("num_batches_tracked")]
