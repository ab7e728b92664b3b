"""Models by name, for the command line: of torchvision, timm and transformers, or anything in Python.

    resnet152, vit_b_16                 torchvision
    vit_small_patch16_224, timm/…       timm (the prefix where torchvision has the name too)
    gpt2, llama, bert, hf/…             transformers: a model type, a folder with a config.json, or a name on the hub, owner/name
    package.module:function             a function without arguments that returns a model, or (model, example)

`built` builds them without values, so a model larger than the machine is no problem. Weights are never downloaded.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from ..extras import require
from ..memory.fake import PlanningMode


@dataclass(frozen=True)
class Source:
    """How to build a model, and a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[nn.Module, int, int | None], Any]  # of the model, the batch size and the size of an input
    sizes: str = (
        ""  # what is counted by the size of an input: "side" of an image, "length" of a text; "" if it has none
    )
    usual: Callable[[nn.Module], int] | None = None  # the size where none is given
    most: Callable[[nn.Module], int | None] = lambda model: None

    def size(self, model: nn.Module, given: int | None) -> int | None:
        """The size of an input.

        Raises:
            ValueError: if the model cannot take it.
        """
        most = self.most(model)
        if given is not None and most is not None and given > most:
            raise ValueError(f"{self.name} takes at most {most} tokens; got --size {given}.")
        return given if given is not None or self.usual is None else min(self.usual(model), most or 2**62)


def built(source: Source) -> tuple[nn.Module, PlanningMode]:
    """The model without values, or with values if its own code reads them."""
    mode = PlanningMode(guesses=True)
    try:
        with mode, _uninitialised():
            return source.build().train(), mode
    except DataDependentOutputException:
        return source.build().train(), mode


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Initialisers do nothing. Some read values, so a model that calls them could not be built without values."""
    kept = {name: getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")}
    for name in kept:
        setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(nn.init, name, function)


def source(name: str) -> Source:
    """The model of that name.

    Raises:
        ValueError: if no library has the name. The message names the nearest ones.
    """
    if ":" in name:
        return _own(name)
    prefix, _, rest = name.partition("/")
    if prefix in _LIBRARIES and rest:
        _, find, _ = _LIBRARIES[prefix]
        found = find(rest)
        if found is None:
            raise ValueError(f"{prefix} has no model {rest!r}.{_near(rest, [prefix])}")
        return found
    for package, find, _ in _LIBRARIES.values():
        found = find(name) if find_spec(package) is not None else None
        if found is not None:
            return found
    missing = [package for package, *_ in _LIBRARIES.values() if find_spec(package) is None]
    where = (
        f" Not installed, so not looked in: {', '.join(missing)} (pip install {' '.join(missing)})." if missing else ""
    )
    raise ValueError(
        f"no model is called {name!r}.{_near(name, _LIBRARIES)}{where} A model of yours is package.module:function."
    )


def _torchvision(name: str) -> Source | None:
    models = require("torchvision").models
    if name not in models.list_models():
        return None
    return _of_images(f"torchvision {name}", lambda: models.get_model(name, weights=None))


def _timm(name: str) -> Source | None:
    timm = require("timm")
    if name not in timm.list_models():
        return None
    return _of_images(f"timm {name}", lambda: timm.create_model(name, pretrained=False))


def _transformers(name: str) -> Source | None:
    transformers = require("transformers")
    if Path(name, "config.json").is_file() or "/" in name:
        try:
            config = transformers.AutoConfig.from_pretrained(name)
        except Exception as error:  # of the hub, of the network, or of a model of another library
            raise ValueError(
                f"{name!r} is no folder with a config.json, and its config could not be had from the hub "
                f"({type(error).__name__}): look at the name and the connection, or download it first."
            ) from error
    elif name in transformers.CONFIG_MAPPING:
        config = transformers.AutoConfig.for_model(name)
    else:
        return None
    config.use_cache = False  # blocks are trained without
    of_two = (transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForSpeechSeq2Seq)
    heads = of_two if getattr(config, "is_encoder_decoder", False) else (transformers.AutoModelForCausalLM,)
    head = next((head for head in heads if type(config) in head._model_mapping), transformers.AutoModel)
    reads = hasattr(config, "vocab_size")
    usual = (lambda model: 512) if reads else lambda model: _side(model.config)
    return Source(
        f"transformers {name}",
        lambda: head.from_config(config),
        _of_config,
        "length" if reads else "side",
        usual,
        _positions,
    )


def _of_images(name: str, build: Callable[[], nn.Module]) -> Source:
    return Source(name, build, _images, "side", _usual_side)


_LIBRARIES: dict[str, tuple[str, Callable[[str], Source | None], Callable[[], Iterable[str]]]] = {
    "torchvision": ("torchvision", _torchvision, lambda: require("torchvision").models.list_models()),
    "timm": ("timm", _timm, lambda: require("timm").list_models()),
    "hf": ("transformers", _transformers, lambda: require("transformers").CONFIG_MAPPING),
}
"""By prefix: the package, what finds a model in it, and what lists its models."""


def _near(name: str, prefixes: Iterable[str]) -> str:
    """A sentence with the nearest names in the libraries that are installed."""
    libraries = (_LIBRARIES[prefix] for prefix in prefixes)
    known = {model for package, _, listed in libraries if find_spec(package) for model in listed()}
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f" Did you mean {', '.join(near)}?" if near else ""


def _own(name: str) -> Source:
    path, _, function = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        make = getattr(import_module(path), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"no Python module is called {path!r} ({error}). Run from the folder that has it.") from error
    except AttributeError as error:
        near = difflib.get_close_matches(function, dir(import_module(path)), n=1)
        raise ValueError(f"{path} has no {function!r}." + (f" Did you mean {near[0]!r}?" if near else "")) from error
    made: list[Any] = []

    def build() -> nn.Module:
        result = make()
        made[:] = result if isinstance(result, tuple) else (result, None)
        if not isinstance(made[0], nn.Module):
            raise ValueError(
                f"{name} returned {type(made[0]).__name__}; it must return a model, or a model and an example."
            )
        return made[0]

    def example(model: nn.Module, batch: int, size: int | None) -> Any:
        if made[1] is None:
            return _images(model, batch, size)
        return torch.utils._pytree.tree_map(lambda t: _repeated(t, batch), made[1])

    return Source(name, build, example)


def _repeated(value: Any, batch: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return value[:1].expand(batch, *value.shape[1:]).contiguous()


def _usual_side(model: nn.Module) -> int:
    given = getattr(model, "default_cfg", None) or {}
    return int(given.get("input_size", (3, 224, 224))[-1])


def _images(model: nn.Module, batch: int, size: int | None) -> Any:
    size = size or _usual_side(model)
    return torch.randn(batch, 3, size, size)


def _side(config: Any) -> int:
    pixels = getattr(config, "image_size", 224)
    return int(pixels if isinstance(pixels, int) else pixels[0])


def _positions(model: nn.Module) -> int | None:
    """The most tokens, where the model has a table of positions. Without values nothing else would say so."""
    names = ("max_position_embeddings", "max_target_positions")
    most = next((most for name in names if (most := getattr(model.config, name, None)) is not None), None)
    tables = (module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return most if most is not None and any(most <= size < most + 4 for size in tables) else None


def _of_config(model: nn.Module, batch: int, size: int | None) -> Any:
    config: Any = model.config
    if not hasattr(config, "vocab_size"):
        side = size or _side(config)
        return {"pixel_values": torch.randn(batch, getattr(config, "num_channels", 3), side, side)}
    tokens = torch.zeros(batch, size or 512, dtype=torch.long)
    inputs = {"input_ids": tokens}
    if hasattr(config, "num_mel_bins"):  # sound, as long as the model takes it
        inputs = {"input_features": torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.clone()
    return inputs


class _Adapted(nn.Module):
    """x W + x A B, of which A and B are trained."""

    def __init__(self, layer: nn.Module, rank: int) -> None:
        super().__init__()
        shape: tuple[int, int] = layer.weight.shape  # type: ignore[assignment]
        given, made = shape if type(layer).__name__ == "Conv1D" else shape[::-1]
        self.layer, self.a, self.b = layer, nn.Linear(given, rank, bias=False), nn.Linear(rank, made, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.b(self.a(x))


def adapted(model: nn.Module, rank: int) -> None:
    """Train adapters of this rank (LoRA) at every linear layer but the last, and nothing else."""
    model.requires_grad_(False)
    places = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children()
        if type(child) is nn.Linear or type(child).__name__ == "Conv1D"
    ]  # fmt: skip
    if len(places) < 2:
        raise ValueError(f"--lora-rank needs linear layers to adapt, and {type(model).__name__} has {len(places)}.")
    for parent, name, child in places[:-1]:
        setattr(parent, name, _Adapted(child, rank))
