"""The pretrained networks, from files that `prepare` has made or that are as published, checked.

    cifar10_resnets/resnet20-12fca82f.th, resnet56-4bfd9763.th     as published; the name holds the file's digest
    pretrained/resnet50.pt                                float16, torchvision's names
    pretrained/smollm2-1.pt, …                            the blocks of 4 and 8 bit of the GGUF file, as they are there
    pretrained/minilm.pt                                  float16, the names of transformers' BertModel

all within the data directory (`--data-dir`, else RETROGRADE_DATA, else `data`).
"""

from __future__ import annotations

import json
import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.extras import require

from ..data.images import damaged, data_dir, missing
from ..data.weights import as_published
from .cifar_resnet import CifarResNet

Root = str | Path | None
FOLDER = "pretrained"
PREPARE = "`python -m retrograde_experiments.pretrained prepare --data-dir {root}` makes it from the download."
CIFAR_HOW = (
    "the files resnet20-12fca82f.th and resnet56-4bfd9763.th of Y. Idelbayev's pytorch_resnet_cifar10 (BSD-2), put into "
    "{folder}."
)


def cifar_resnet(depth: int, root: Root = None) -> CifarResNet:
    """ResNet-20 or ResNet-56 for CIFAR-10, in eval mode; input normalised by `CIFAR_MEAN`, `CIFAR_STD`.

    Raises:
        DataError: if there is no such file, or its contents do not fit its name.
    """
    folder = data_dir(root) / "cifar10_resnets"
    how = CIFAR_HOW.format(folder=folder)
    path = next(iter(sorted(folder.glob(f"resnet{depth}-*.th"))), None)
    if path is None:
        raise missing(
            f"the weights of ResNet-{depth} for CIFAR-10", data_dir(root), f"  {folder}/resnet{depth}-DIGEST.th", how
        )
    digest, named = sha256(path.read_bytes()).hexdigest(), path.stem.partition("-")[2]
    if not digest.startswith(named):
        raise damaged(path, f"its digest begins with {digest[:8]}, not with {named}", how)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except (KeyError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}", how) from error
    net = CifarResNet(depth)
    _fill(net, {name.removeprefix("module."): value for name, value in held.items()}, path, how)
    return net.eval()


CIFAR_MEAN = (123.675, 116.28, 103.53)  # those of ImageNet: what these networks were trained with
CIFAR_STD = (58.395, 57.12, 57.375)


def resnet50(root: Root = None) -> nn.Module:
    """torchvision's resnet50 with ImageNet weights, in eval mode; input in RGB, 0 … 255, less `data.weights.MEAN`.

    Raises:
        DataError: if its file is missing or damaged.
    """
    state, about, path, how = _prepared("resnet50", root)
    models = require("torchvision.models.resnet")
    layers, width = about.get("layers", [3, 4, 6, 3]), about.get("width_per_group", 64)
    net = as_published(models.ResNet(models.Bottleneck, layers, width_per_group=width))
    _fill(
        net, {name: value.float() if value.is_floating_point() else value for name, value in state.items()}, path, how
    )
    return net.eval()


def smollm2(root: Root = None) -> nn.Module:
    """SmolLM2-135M-Instruct, a Llama of 30 blocks, as transformers' LlamaForCausalLM in float32, in eval mode.

    Raises:
        DataError: if its files are missing or damaged.
    """
    folder = data_dir(root) / FOLDER
    count = len(sorted(folder.glob("smollm2-*.pt"))) or 1
    state: dict[str, Tensor] = {}
    for k in range(1, count + 1):
        held, about, path, how = _prepared(f"smollm2-{k}", root)
        state |= {name.partition(":")[0]: dequantised(value, name.partition(":")[2]) for name, value in held.items()}
    if about.get("parts", count) != count:
        raise damaged(folder, f"it has {count} of the {about['parts']} files smollm2-*.pt", how)
    transformers = require("transformers")
    net: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**about["config"]))
    if about["config"]["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    _fill(net, state, path, how)
    return net.eval()


def minilm(root: Root = None) -> nn.Module:
    """all-MiniLM-L6-v2, a BERT of 6 layers, without its pooler, in eval mode. `embedded` makes sentence vectors of its output.

    Raises:
        DataError: if its file is missing or damaged.
    """
    state, about, path, how = _prepared("minilm", root)
    transformers = require("transformers")
    net: nn.Module = transformers.BertModel(transformers.BertConfig(**about["config"]), add_pooling_layer=False)
    _fill(net, {name: value.float() for name, value in state.items()}, path, how)
    return net.eval()


def embedded(net: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """One unit vector per sentence: the mean of the last layer over its tokens, normalised."""
    hidden = net(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def dequantised(rows: Tensor, kind: str) -> Tensor:
    """The floats of a matrix in one of GGUF's forms; each block holds 32 numbers of a row.

    Q4_1: two halves d, m, 16 bytes of two q each (first half of the block in the low bits): d·q + m. Q8_0: a half d, 32 signed
    bytes q: d·q. "": floats as they are.
    """
    if not kind:
        return rows.float()
    blocks = rows.reshape(rows.shape[0], -1, {"Q4_1": 20, "Q8_0": 34}[kind])
    d = blocks[..., :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        return (blocks[..., 2:].contiguous().view(torch.int8).float() * d).flatten(1)
    m, pairs = blocks[..., 2:4].contiguous().view(torch.float16).float(), blocks[..., 4:]
    return (torch.cat([pairs & 15, pairs >> 4], -1).float() * d + m).flatten(1)


def _prepared(name: str, root: Root) -> tuple[dict[str, Tensor], dict[str, Any], Path, str]:
    """The tensors of a prepared file, what it says about them, its path, and how it is made."""
    base = data_dir(root)
    path, how = base / FOLDER / f"{name}.pt", PREPARE.format(root=base)
    return *read_tensors(path, base, how), path, how


def read_tensors(path: Path, base: Path, how: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and the dictionary that was stored with them."""
    if not path.exists():
        raise missing(path.stem, base, f"  {path}", how)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        return held["tensors"], json.loads(held["about"])
    except Exception as error:  # torch raises many kinds for a damaged file
        raise damaged(path, f"{type(error).__name__}: {error}", how) from error


def _fill(net: nn.Module, state: dict[str, Tensor], path: Path, how: str) -> None:
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise damaged(path, f"its tensors are not those of a {type(net).__name__}: {error}", how) from error
