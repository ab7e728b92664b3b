"""The cases: which network, at which batch, in which precision.

"full" is for a GPU, "cpu" for a CPU; each case has a small twin that takes seconds on a CPU ("smoke").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .networks import Network, cifar_resnet, convolutions, mlp, resnet152, tiny_resnet, transformer

SIZES = ("smoke", "cpu", "full")


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


@dataclass(frozen=True)
class Case:
    """One row group of the table.

    Attributes:
        name: for `--cases`; `title`: for people.
        network: builds the weights.
        shape: of one example; `batch`: how many.
        autocast: the dtype of autocast, or None for float32 (matrix products and convolutions in TF32 where there is any).
        layout: memory format of images.
        options: "whole": small enough to be compiled as one graph. "named": not every baseline is measured where none is named.
            "untimed": memory alone.
    """

    name: str
    title: str
    network: Callable[[], Network]
    shape: tuple[int, ...]
    batch: int
    autocast: torch.dtype | None = None
    layout: torch.memory_format = torch.contiguous_format
    options: tuple[str, ...] = ()

    @property
    def images(self) -> bool:
        """Whether it is a ResNet, whose blocks end in relu(x + f(x))."""
        return "images" in self.options

    @property
    def planes(self) -> bool:
        """Whether x has channels and two sides."""
        return len(self.shape) == 3

    def inputs(self, batch: int, device: torch.device | str) -> Tensor:
        """A batch. Tokens carry gradients, as behind an embedding; images do not."""
        x = torch.randn(batch, *self.shape, device=device)
        return x.contiguous(memory_format=self.layout) if self.planes else x.requires_grad_()


def _sized(smoke: Case, size: str = "full", **full: object) -> dict[str, Case]:
    return {"smoke": smoke, size: replace(smoke, **full)}  # type: ignore[arg-type]


def _transformer(
    name: str, title: str, depth: int, small: int, batch: int, tokens: int, **rest: object
) -> dict[str, Case]:
    few = min(tokens // 16, 64)
    smoke = Case(
        name, f"{title} (smoke: L{small}, d 32, {few} tokens)", lambda: transformer(small, 32, 4, few), (few, 32), 2,
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip
    return _sized(
        smoke, title=title, network=lambda: transformer(depth, 1024, 16, tokens), shape=(tokens, 1024), batch=batch,
    )  # fmt: skip


def _resnet152(batch: int, bf16: bool) -> dict[str, Case]:
    precision = "bf16" if bf16 else "fp32"
    title = f"ResNet-152, {batch}×224², {precision}"
    smoke = Case(
        f"resnet152-{batch}-{precision}", f"{title} (smoke: 12 blocks, 32²)", tiny_resnet, (3, 32, 32), 2 + 2 * (batch > 64),
        torch.bfloat16 if bf16 else None, torch.channels_last, ("images",),
    )  # fmt: skip
    return _sized(smoke, title=title, network=resnet152, shape=(3, 224, 224), batch=batch)


_CIFAR = Case(
    "resnet1202-128-fp32", "ResNet-1202 (CIFAR size), 128×32², fp32 (smoke: depth 38, 16²)", lambda: cifar_resnet(38, 16),
    (3, 16, 16), 2, options=("images",),
)  # fmt: skip
_BF16 = torch.bfloat16


def _mlp(name: str, depth: int, batch: int, width: int, note: str = "", **rest: object) -> dict[str, Case]:
    title = f"MLP, depth {depth}, {batch}×{width}{note}"
    smoke = Case(name, f"{title} (smoke: depth 8, 64×64)", lambda: mlp(8, 64), (64,), 64, options=("named",))
    return _sized(smoke, "cpu", title=title, network=lambda: mlp(depth, width), shape=(width,), batch=batch, **rest)


def _convolutions(name: str, depth: int, **rest: object) -> dict[str, Case]:
    title = f"convolutions, depth {depth}, 32×64×32²"
    small = f"{title} (smoke: depth 4, 2×8×8²)"
    smoke = Case(name, small, lambda: convolutions(4, 8, 8), (8, 8, 8), 2, options=("named",))
    return _sized(
        smoke, "cpu", title=title, network=lambda: convolutions(depth, 64, 32), shape=(64, 32, 32), batch=32, **rest
    )  # fmt: skip


_UNTIMED = ("named", "untimed")
_ALL = (
    _transformer(
        "transformer-L24-bf16", "transformer L24, 64×512, bf16", 24, 4, 64, 512, autocast=_BF16, options=("whole",)
    ),
    _transformer(
        "transformer-L96-bf16", "transformer L96, 32×512, bf16", 96, 8, 32, 512, autocast=_BF16
    ),
    _transformer("transformer-L96-fp32", "transformer L96, 32×512, fp32", 96, 8, 32, 512),
    _transformer("transformer-16k-bf16", "transformer L24, 1×16384, bf16", 24, 4, 1, 16384, autocast=_BF16),
    _convolutions("conv-16", 16),
    _convolutions("conv-48", 48, options=_UNTIMED),
    _mlp("mlp-50", 50, 500, 500),
    _mlp("mlp-400", 400, 500, 500, options=_UNTIMED),
    _mlp("tiny-200", 200, 2, 16, ": the host's time alone"),
    *(_resnet152(batch, bf16) for batch in (64, 320) for bf16 in (False, True)),
    *(
        _sized(
            replace(_CIFAR, name=name, layout=layout), title=f"ResNet-1202 (CIFAR size), 128×32², fp32{note}",
            network=lambda: cifar_resnet(1202), shape=(3, 32, 32), batch=128,
        )
        for name, layout, note in (
            ("resnet1202-128-fp32", torch.contiguous_format, ""),
            ("resnet1202-last-128-fp32", torch.channels_last, ", channels_last"),
        )
    ),
)  # fmt: skip


def cases(size: str, patterns: Sequence[str] = ("*",)) -> list[Case]:
    """The cases whose names match a pattern; a pattern without wildcards matches anywhere in the name."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}; got {size!r}.")
    return selected([case[size] for case in _ALL if size in case], patterns, "case")


def selected(things: Sequence[T], patterns: Sequence[str], kind: str) -> list[T]:
    """Those whose `name` matches: the pattern itself, or with wildcards, or else anywhere in the name.

    Raises:
        ValueError: for a pattern that matches none.
    """
    names = [thing.name for thing in things]
    chosen: set[str] = set()
    for pattern in patterns:
        found = (
            {pattern} & set(names) or {n for n in names if fnmatch(n, pattern)} or {n for n in names if pattern in n}
        )
        if not found:
            raise ValueError(f"no {kind} is called {pattern!r}. There are: {', '.join(names)}.")
        chosen |= found
    return [thing for thing in things if thing.name in chosen]
