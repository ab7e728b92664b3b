"""The cases: which network, at which batch, in which precision. Each has a small twin for a CPU ("smoke")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from .networks import Network, cifar_resnet, resnet152, tiny_resnet, transformer

SIZES = ("smoke", "full")


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
        options: what else is measured: "budgets" (a sweep over budgets), "whole" (compiled as one graph), "deep" (steps of
            two layers).
        share: of checkpoint's memory, that the "fitted" methods are given.
    """

    name: str
    title: str
    network: Callable[[], Network]
    shape: tuple[int, ...]
    batch: int
    autocast: torch.dtype | None = None
    layout: torch.memory_format = torch.contiguous_format
    options: tuple[str, ...] = ()
    share: float = 1.0

    @property
    def images(self) -> bool:
        return len(self.shape) == 3

    def inputs(self, batch: int, device: torch.device | str) -> Tensor:
        """A batch. Tokens carry gradients, as behind an embedding; images do not."""
        x = torch.randn(batch, *self.shape, device=device)
        return x.contiguous(memory_format=self.layout) if self.images else x.requires_grad_()


def _sized(smoke: Case, **full: object) -> dict[str, Case]:
    return {"smoke": smoke, "full": replace(smoke, **full)}  # type: ignore[arg-type]


def _transformer(
    name: str, title: str, depth: int, small: int, batch: int, tokens: int, share: float = 0.5, **rest: object
) -> dict[str, Case]:
    few = min(tokens // 16, 64)
    smoke = Case(
        name, f"{title} (smoke: L{small}, d 32, {few} tokens)", lambda: transformer(small, 32, 4, few), (few, 32), 2,
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip
    return _sized(
        smoke, title=title, network=lambda: transformer(depth, 1024, 16, tokens), shape=(tokens, 1024), batch=batch,
        share=share,
    )  # fmt: skip


def _resnet152(batch: int, bf16: bool) -> dict[str, Case]:
    precision = "bf16" if bf16 else "fp32"
    title = f"ResNet-152, {batch}×224², {precision}"
    smoke = Case(
        f"resnet152-{batch}-{precision}", f"{title} (smoke: 12 blocks, 32²)", tiny_resnet, (3, 32, 32), 2 + 2 * (batch > 64),
        torch.bfloat16 if bf16 else None, torch.channels_last,
    )  # fmt: skip
    return _sized(smoke, title=title, network=resnet152, shape=(3, 224, 224), batch=batch, share=0.8 if bf16 else 0.7)


_CIFAR = Case(
    "resnet1202-128-fp32", "ResNet-1202 (CIFAR size), 128×32², fp32 (smoke: depth 38, 16²)", lambda: cifar_resnet(38, 16),
    (3, 16, 16), 2,
)  # fmt: skip
_BF16 = torch.bfloat16
_ALL = (
    _transformer(
        "transformer-L24-bf16", "transformer L24, 64×512, bf16", 24, 4, 64, 512, autocast=_BF16, options=("budgets", "whole"),
        share=0.6,
    ),
    _transformer(
        "transformer-L96-bf16", "transformer L96, 32×512, bf16", 96, 8, 32, 512, autocast=_BF16, share=0.35, options=("deep",)
    ),
    _transformer("transformer-L96-fp32", "transformer L96, 32×512, fp32", 96, 8, 32, 512, share=0.25),
    _transformer("transformer-16k-bf16", "transformer L24, 1×16384, bf16", 24, 4, 1, 16384, autocast=_BF16),
    *(_resnet152(batch, bf16) for batch in (64, 320) for bf16 in (False, True)),
    *(
        _sized(
            replace(_CIFAR, name=name, layout=layout), title=f"ResNet-1202 (CIFAR size), 128×32², fp32{note}",
            network=lambda: cifar_resnet(1202), shape=(3, 32, 32), batch=128, share=0.15,
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
    return selected([case[size] for case in _ALL], patterns, "case")


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
