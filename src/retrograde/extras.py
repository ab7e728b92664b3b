"""Optional packages: imported when they are used, with an error that says what to install.

    torchvision = require("torchvision")

The compiled part of torchvision may need CUDA libraries that a CPU build of PyTorch does not have. Without that part torchvision
fails to import, because of two box operators that no residual network uses. `require` then declares these operators without a
body and imports torchvision again: models and transforms work, box operators and `torchvision.io` do not. A torchvision that
imports is not changed. timm, lightning and others import torchvision themselves, so `require` imports it before them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

EXTRAS = {
    "torchvision": "vision", "timm": "vision", "PIL": "vision", "transformers": "hf", "safetensors": "hf",
    "torchdiffeq": "ode", "scipy": "theory", "triton": "kernels", "matplotlib": "cli", "rich": "cli", "typer": "cli",
    "sklearn": "cli", "lightning": "train", "accelerate": "train", "peft": "train",
    "trl": "train",
}  # fmt: skip
_ON_TORCHVISION = {"timm", "lightning", "peft", "torchmetrics", "transformers", "trl"}
_declared: list[torch.library.Library] = []


def require(name: str) -> ModuleType:
    """Import a package. Raises ModuleNotFoundError, with the extra to install, if it is missing.

    >>> require("math").pi > 3
    True
    """
    package = name.split(".")[0]
    if package in _ON_TORCHVISION and "torchvision" not in sys.modules and find_spec("torchvision"):
        require("torchvision")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        extra = EXTRAS.get(package)
        source = f'pip install "retrograde[{extra}]"' if extra else f"pip install {package}"
        raise ModuleNotFoundError(f"this needs {package}, not found here: {source}", name=package) from error
    except RuntimeError as error:
        if package != "torchvision" or "operator torchvision::nms does not exist" not in str(error) or _declared:
            raise
        for half_imported in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[half_imported]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)  # the declarations live as long as this object
        return import_module(name)
