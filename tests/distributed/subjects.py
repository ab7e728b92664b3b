"""Models to train on one process or two, and the training that they all get.

A subject is a whole model, made anew from a seed for every run, with a momentum stack somewhere inside. To put another kind of
model through every test of this folder, add it to `SUBJECTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import retrograde as rg
from problems import Attention, Mlp, Residual, assert_same_bits, conv

MODES = ("store", "reverse", "checkpoint")
SAMPLES, OUTPUTS = 8, 3


class Model(nn.Module):
    """Stem, momentum stack, head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, **options: Any) -> None:
        super().__init__()
        self.stem, self.body, self.head = stem, rg.MomentumNet(blocks, gamma=0.9, **options), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


@dataclass(frozen=True)
class Subject:
    """
    Args:
        make: the model, for a memory mode and a `verify`.
        stack: where the blocks of its stack are.
        shape: of one sample.
        alone: whether a sample's output depends on that sample only: then two half batches are one whole batch.
    """

    make: Callable[[str, str], nn.Module]
    stack: str
    shape: tuple[int, ...]
    alone: bool

    def build(self, memory: str, verify: str = "off") -> nn.Module:
        """The model with its first weights, the same on every rank and in every mode."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.make(memory, verify)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks of its stack, to be sharded one by one."""
        return list(model.get_submodule(self.stack).children())

    def batch(self, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The joined batch of a step: inputs and targets."""
        numbers = torch.Generator().manual_seed(step)
        x = torch.randn(SAMPLES, *self.shape, generator=numbers).to(dtype)
        return x, torch.randn(SAMPLES, OUTPUTS, generator=numbers).to(dtype)


def _mlp(memory: str, verify: str) -> nn.Module:
    return Model(
        nn.Linear(6, 16), [Mlp(16, 24) for _ in range(6)], nn.Linear(16, OUTPUTS), memory=memory, verify=verify
    )


def _attention(dropout: float, memory: str, verify: str) -> nn.Module:
    blocks: list[nn.Module] = [b for _ in range(3) for b in (Attention(8, dropout), Mlp(8, 16))]
    head = nn.Sequential(nn.Flatten(), nn.Linear(5 * 8, OUTPUTS))
    return Model(nn.Linear(6, 8), blocks, head, memory=memory, verify=verify)


def _conv(memory: str, verify: str) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, OUTPUTS))
    return Model(stem, [conv(4) for _ in range(4)], head, memory=memory, verify=verify)


def _converted(memory: str, verify: str) -> nn.Module:
    body = nn.Sequential(*(Residual(Mlp(16, 24)) for _ in range(6)))
    model = nn.Sequential(nn.Linear(6, 16), body, nn.Linear(16, OUTPUTS))
    return rg.convert(model, stages=["1"], memory=memory, verify=verify)


class Added(nn.Module):
    """A loop that adds what its blocks give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(16, 24) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _branches(memory: str, verify: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 16), Added(), nn.Linear(16, OUTPUTS))
    return rg.convert(model, form="branch", stages=["1.layers"], memory=memory, verify=verify)


def _split(memory: str, verify: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(6, 8), body, nn.Flatten(), nn.Linear(5 * 8, OUTPUTS))
    return rg.convert(model, split=True, memory=memory, verify=verify)


SUBJECTS = {
    "mlp": Subject(_mlp, "body.blocks", (6,), alone=True),
    "attention": Subject(partial(_attention, 0.0), "body.blocks", (5, 6), alone=True),
    "attention+dropout": Subject(partial(_attention, 0.2), "body.blocks", (5, 6), alone=False),
    "converted": Subject(_converted, "1", (6,), alone=True),
    "split": Subject(_split, "1.layers", (5, 6), alone=True),
    "branch": Subject(_branches, "1.layers", (6,), alone=True),
    "conv+batchnorm": Subject(_conv, "body.blocks", (2, 5, 5), alone=False),
}


def here(t: Tensor) -> Tensor:
    """A tensor, or this rank's part of a sharded one, as it is now."""
    return (t.to_local() if isinstance(t, DTensor) else t).detach().clone()


def train(
    model: nn.Module,
    subject: Subject,
    rank: int | None,
    *,
    steps: int = 2,
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    sync: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Train by SGD with momentum; the outputs and gradients of every step, and every parameter and buffer at the end (of sharded
    ones this rank's part).

    Args:
        rank: whose half of each batch to train on; None for the joined batch.
        micro: micro-batches per step, whose gradients are accumulated.
        sync: context of a micro-batch, told whether it is the step's last.
        around: context of each forward pass and loss.
    """  # fmt: skip
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for part, (x, target) in enumerate(_parts(subject.batch(step, dtype), rank, micro)):
            with sync(part == micro - 1):
                with around():
                    y = model(x)
                    loss = (y - target).square().mean() / micro
                loss.backward()
            found[f"output {step}.{part}"] = y.detach().clone()
        found |= {f"gradient {step} of {n}": here(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    found |= {n: here(p) for n, p in model.named_parameters()}
    return found | {f"buffer {n}": b.clone() for n, b in model.named_buffers()}


def _parts(batch: tuple[Tensor, Tensor], rank: int | None, micro: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, target = batch if rank is None else tuple(t.chunk(2)[rank] for t in batch)
    yield from zip(x.chunk(micro), target.chunk(micro), strict=True)


def in_every_mode(run: Callable[[str], dict[str, Tensor]], seed: int = 100) -> dict[str, Tensor]:
    """What a run in reverse mode gave, once the runs in all modes agree to the bit. Each begins at the same random number."""
    found = {}
    for mode in MODES:
        torch.manual_seed(seed)
        found[mode] = {name.replace("module.", ""): t for name, t in run(mode).items()}
        assert_same_bits(found["store"], found[mode])
    return found["reverse"]


def joined(kinds: Iterable[str], case: Callable[..., Any]) -> dict[str, Callable[[int], Any]]:
    """Cases by name, of kinds that train on two processes as on one with the joined batch, in float32 and float64."""
    return {
        f"joined {kind} {str(dtype).split('.')[1]}": partial(case, kind, dtype)
        for kind in kinds for dtype in (torch.float32, torch.float64)
    }  # fmt: skip


def assert_as_one(found: dict[str, Tensor], one: dict[str, Tensor], terms: int) -> None:
    """Equal to reduction-order rounding.

    A weight's gradient is a sum over samples and positions; two processes add the halves first. A sum of that many terms is off by
    at most terms · eps/2 of the sum of their magnitudes either way, so by terms · eps between the two; four times that for what
    steps and cancellation add. In float64 the same bound is 2^29 times tighter: nothing but rounding is behind the difference.
    """
    for name, t in found.items():
        if t.is_floating_point() and (t.shape == one[name].shape or not name.startswith("output")):
            units = relative_distance(t, one[name]) / torch.finfo(t.dtype).eps
            assert units < 4 * terms, f"{name}: {units:.1f} units in the last place"


def terms_of(kind: str) -> int:
    """How many samples and positions a weight's gradient is a sum over."""
    return SAMPLES * math.prod(SUBJECTS[kind].shape[:-1])


def gradients_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in found.items() if n.startswith("gradient")}


def relative_distance(a: Tensor, b: Tensor) -> float:
    """max |a − b| as a part of max |b|."""
    return float((a - b).abs().amax() / b.abs().amax().clamp_min(torch.finfo(b.dtype).tiny))
