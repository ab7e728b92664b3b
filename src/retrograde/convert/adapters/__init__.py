"""What is known about the residual blocks of other libraries, by the names of their classes: nothing is imported.

An adapter is one function, `judge(block, owner)`, for a block whose forward is that of its library's class `owner`: `KEEPS` if
it computes x + f(x) with the shape of x, a reason if it is a block of the kind but does not, None if it is no such block.
"""

from __future__ import annotations

from importlib import import_module

from torch import nn

KEEPS = "keeps the shape of its input"
_ADAPTERS = {
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
    "transformers_modules": "transformers",
    "torch": "plain",
    "retrograde": "own",
}
_CHAINS = {"timm.models.regnet.RegStage"}


def is_chain(module: nn.Module) -> bool:
    """Whether a module that is no container runs its children one after another, as `nn.Sequential` does."""
    return f"{type(module).__module__}.{type(module).__name__}" in _CHAINS


def judge(block: nn.Module) -> str | None:
    """`KEEPS`, the reason why not, or None for a module that no adapter knows."""
    owner = next(cls for cls in type(block).__mro__ if "forward" in vars(cls))
    adapter = _ADAPTERS.get(owner.__module__.split(".")[0])
    if adapter is None:
        return None
    verdict: str | None = import_module(f"{__name__}.{adapter}").judge(block, owner)
    return verdict


def without(block: nn.Module, shortcut: str) -> str:
    """The verdict on a block that keeps its shape unless it has this submodule."""
    present = getattr(block, shortcut, None)
    if present is None or isinstance(present, nn.Identity):
        return KEEPS
    return f"changes the shape of its input ({shortcut})"


def with_skip(block: nn.Module, flag: str) -> str:
    """The verdict on a block that is residual only if this attribute is true."""
    return KEEPS if getattr(block, flag) else "has no residual connection (its shape changes)"
