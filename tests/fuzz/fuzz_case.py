"""A random network and what is done with it, all from one integer.

`draw(seed)` makes the choices, `build(case)` the network, `inputs(case)` what it is run on. The same seed gives the same of all
three on every machine; `str(case)` says it in one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from fuzz_blocks import CHANNELS, KINDS, LENGTH, ONCE_ONLY, RANDOM, SIDE, WIDTH, WRITES, Conditioned, Mlp, Residual
from torch import Tensor, nn

import retrograde as rg

SHAPES = {"vector": (WIDTH,), "tokens": (LENGTH, WIDTH), "image": (CHANNELS, SIDE, SIDE)}
GAMMAS = [0.9, 0.9, 0.5, 0.99, 1.0, 1 / 3, 0.1, 0.999, 0.75, 1e-4, 1 - 1e-5, 32766 / 32767, 2e-6, 0.6180339887]
PROGRAMS = {
    "backward": 8, "grad": 3, "retain": 3, "create_graph": 3, "two losses": 2, "two forwards": 3, "twice": 2, "steps": 4,
    "optimizer in backward": 2, "between": 2, "functional": 2, "offload": 1, "checkpointed": 2, "thread": 1, "encode": 3,
    "hooks": 2, "failed first": 2,
}  # fmt: skip
EXTRAS = ["none", "none", "none", "memory", "memory.grad", "scale", "scale.grad", "nested", "nested.grad", "none given"]


@dataclass(frozen=True)
class Case:
    """Every choice about one network."""

    seed: int
    layout: str
    kinds: tuple[str, ...]  # of the distinct blocks
    order: tuple[int, ...]  # the block of each layer: ties
    gammas: tuple[float, ...]  # one, or one per layer
    signed: bool  # γ of random sign
    form: str
    velocity: str
    dtype: torch.dtype
    autocast: torch.dtype | None
    backward_inside: bool
    fixed_point: rg.FixedPoint | str
    verify: str
    overflow: str
    extras: str
    frozen: tuple[int, ...]
    evaluated: tuple[int, ...]
    needs_input: bool
    batch: int
    strides: str  # "dense" | "channels_last" | "transposed" | "expanded"
    peak: float
    program: str

    def __str__(self) -> str:
        parts = [
            f"seed {self.seed}: {self.layout}×{self.batch}, depth {len(self.order)}, blocks {'/'.join(self.kinds)}"
        ]
        if len(set(self.order)) < len(self.order):
            parts.append(f"order {','.join(map(str, self.order))}")
        parts.append(f"γ {'±' * self.signed}{','.join(f'{g:.5g}' for g in self.gammas)}")
        parts.append(f"{str(self.dtype)[6:]}" + (f" autocast {str(self.autocast)[6:]}" if self.autocast else ""))
        parts += [f"{name} {value}" for name, value in (
            ("form", self.form), ("velocity", self.velocity), ("fixed point", self.fixed_point), ("verify", self.verify),
            ("overflow", self.overflow), ("extras", self.extras), ("frozen", list(self.frozen)),
            ("eval", list(self.evaluated)), ("strides", self.strides), ("peak", self.peak),
        ) if value not in ("branch", "none", "raise", "dense", "auto", 1.0, [])]  # fmt: skip
        parts.append("x.grad" if self.needs_input else "no x.grad")
        inside = " inside autocast" if self.autocast and self.backward_inside else ""
        return ", ".join(parts) + f": {self.program}{inside}"

    @property
    def modes(self) -> tuple[str, ...]:
        return ("checkpoint",) if 0 in self.gammas else ("reverse", "checkpoint")

    @property
    def repeatable(self) -> bool:
        """Whether every block is a function of its input alone."""
        return not RANDOM.intersection(self.kinds)


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = Random(seed)
    layout = rng.choice(["vector", "vector", "tokens", "image"])
    depth = rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 6, 7, 8, 10, 12] if rng.random() < 0.95 else [17, 25, 40])
    program = rng.choices(list(PROGRAMS), list(PROGRAMS.values()))[0]
    names = [k for k in KINDS[layout] if program != "create_graph" or k not in ONCE_ONLY]
    distinct = depth if rng.random() < 0.7 else rng.randint(1, depth)
    kinds = tuple(rng.choice(names) for _ in range(distinct))
    order = tuple(range(depth)) if distinct == depth else tuple(rng.randrange(distinct) for _ in range(depth))
    if program == "optimizer in backward" and distinct < depth:
        program = "steps"  # weights that are needed again may not change in between: refused, and tested elsewhere
    per_layer = rng.random() < 0.25
    gammas = tuple(rng.choice(GAMMAS) for _ in range(depth if per_layer else 1))
    if rng.random() < 0.04 and program != "encode" and not WRITES.intersection(kinds):
        gammas = (0.0,)  # there the input is the user's own tensor, and blocks that write to it are refused
    dtype = rng.choice([torch.float32] * 6 + [torch.float64] * 3 + [torch.bfloat16, torch.float16])
    autocast = rng.choice([None] * 5 + [torch.bfloat16, torch.float16]) if dtype == torch.float32 else None
    half = dtype in (torch.bfloat16, torch.float16)
    strides = rng.choice(["dense"] * 4 + ["channels_last", "transposed", "expanded"])
    # PyTorch 2.13 itself crashes on GroupNorm of a channels_last input that needs no gradient
    needs_input = rng.random() < 0.6 or (layout == "image" and strides != "dense")
    if program == "grad" and "groupnorm" in kinds and strides != "dense":
        program = "backward"  # which asks for the gradient of the input, too
    narrow = dtype != torch.float64 and rng.random() < 0.15
    bits: list[int | None] = [None, None, 6] if narrow else [None, None, 16, 20, 22 if not half else 12]
    signed = all(0 < g < 1 for g in gammas) and Random(seed + 2).random() < 0.2
    return Case(
        seed, layout, kinds, order, gammas, signed,
        form=rng.choice(["branch", "block", "relu"]),
        velocity=rng.choice(["none", "none", "first", "module", "function"]),
        dtype=dtype,
        autocast=autocast,
        backward_inside=rng.random() < 0.4,
        fixed_point=_fixed_point(program, rng.choice(bits), narrow),
        verify=rng.choice(["off", "off", "auto", "auto", "strict"]),
        overflow=rng.choice(["raise", "raise", "raise", "nan"]),
        extras=rng.choice(EXTRAS),
        frozen=tuple(k for k in range(distinct) if rng.random() < 0.5) if rng.random() < 0.3 else (),
        evaluated=tuple(k for k in range(distinct) if rng.random() < 0.5) if rng.random() < 0.3 else (),
        needs_input=needs_input,
        batch=rng.choice([0, 1, 2, 3, 3, 4]) if rng.random() < 0.3 else rng.choice([2, 3]),
        strides=strides,
        peak=rng.choice([1.0] * 8 + [1e-3, 30.0, 1e5]),
        program=program,
    )  # fmt: skip


def _fixed_point(program: str, bits: int | None, narrow: bool) -> rg.FixedPoint | str:
    if program == "failed first" and bits is None:
        bits = 6 if narrow else 20  # a pass that fails has taught the range something, in one mode more than in another
    if bits is None:
        return "int16" if narrow else "auto"
    return rg.FixedPoint(bits, torch.int16 if narrow else torch.int32)


def build(case: Case) -> rg.MomentumNet:
    """The network of a case, in "store" mode."""
    torch.manual_seed(case.seed)
    rng = Random(case.seed + 1)
    blocks: list[nn.Module] = []
    for k, name in enumerate(case.kinds):
        block = KINDS[case.layout][name](rng)
        if case.form == "block" and rng.random() < 0.7:
            block = Residual(block)
        if case.extras != "none":
            block = Conditioned(block, rng.choice([0.1, 0.0]))
        block.requires_grad_(k not in case.frozen)
        if rng.random() < 0.1 and not case.frozen:
            for name_, p in block.named_parameters():
                p.requires_grad_("bias" not in name_)
        blocks.append(block.train(k not in case.evaluated))
    velocity: Any = {"none": None, "first": "first", "function": torch.sin}.get(case.velocity)
    if case.velocity == "module":
        velocity = Mlp(rng) if case.layout != "image" else nn.Conv2d(CHANNELS, CHANNELS, 1)
    gamma: Any = case.gammas[0] if len(case.gammas) == 1 else case.gammas
    net = rg.MomentumNet(
        [blocks[k] for k in case.order], gamma=rg.RandomSign(gamma) if case.signed else gamma, form=case.form,
        velocity=velocity, memory="store", fixed_point=case.fixed_point, verify=case.verify, overflow=case.overflow,
    )  # fmt: skip
    return net.to(case.dtype)


def inputs(case: Case) -> tuple[Tensor, tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """x, further positional and keyword inputs, and those of all of them that need gradients."""
    generator = torch.Generator().manual_seed(case.seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    shape = SHAPES[case.layout]
    x = tensor(case.batch, *shape) * case.peak
    if case.strides == "channels_last" and case.layout == "image":
        x = x.contiguous(memory_format=torch.channels_last)
    elif case.strides == "transposed":
        x = tensor(*shape[::-1], case.batch).permute(*reversed(range(len(shape) + 1)))
    elif case.strides == "expanded" and case.batch:
        x = x[:1].expand(case.batch, *shape)
    leaves = [x.requires_grad_()] if case.needs_input else []
    which, _, grad = case.extras.partition(".")
    extra = (tensor(*shape) if which in ("memory", "nested") else tensor(1)).requires_grad_(bool(grad))
    leaves += [extra] if grad else []
    args: tuple[Any, ...] = {"memory": (extra,), "nested": ({"memory": extra, "by": 0.5}, None, 3)}.get(which, ())
    if which == "none given":
        return x, (None,), {"mask": None}, leaves
    return x, args, {"scale": extra} if which == "scale" else {}, leaves
