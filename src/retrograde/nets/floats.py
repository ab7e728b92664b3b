"""The networks in floats: ordinary operations, which tracers, exporters and compilers see.

    v ← γ·v + gain·f(x)         x ← x + v                    (momentum; gain is 1 − γ, or 1 at γ = 1)
    v ← v + φ(x)                x ← x + ψ(v)                 (coupling)

They agree with the integers up to the rounding of floats, and cannot be undone: v is divided by γ on the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic.squeeze import squeeze
from ..reverse.changes import version
from ..reverse.residual import Residual
from .checks import check_halves

GIVERS = "_retrograde_givers"
"""Where a deployed network has the givers of its blocks."""


def traced() -> bool:
    """Whether a tracer or a compiler runs this, to which some questions cannot be put."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


class Giver:
    """Gives a block its input, or a copy of it if the block writes to it: x is needed afterwards.

    The first call outside of tracers finds out. Until then the block gets a copy.
    """

    def __init__(self) -> None:
        self.writes: bool | None = None

    def __call__(self, block: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
        blind = traced()
        given = x if self.writes is False else _copy(x)
        before = 0 if blind else version(given)
        out = block(given, *args, **kwargs)
        if blind:
            return out
        if version(given) == before:
            self.writes = bool(self.writes)
        elif given is not x:
            self.writes = True
        else:
            self.writes = True
            raise RuntimeError("a block wrote to its input, which it had not done before. Call the model once more.")
        return out


def _copy(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not x.is_inference():
        return x.clone()
    with torch.inference_mode(False), torch.no_grad():
        return x.clone()  # has a version, by which a change is seen


def branch(x: Tensor, y: Tensor, form: str) -> Tensor:
    """f(x) out of what a block of this form returned."""
    if form == "relu":
        y = torch.relu((x + y).to(y.dtype))
    if form != "branch":
        return y - x
    return y if y.dtype == x.dtype else y.to(torch.promote_types(x.dtype, y.dtype))


def velocity(f: Tensor, v: Tensor | None, gamma: float, gain: float) -> Tensor:
    """The next v."""
    if v is None:
        return f if gain == 1 else f * gain
    return v + f if gamma == 1 else torch.lerp(f, v, gamma)


def moved(x: Tensor, v: Tensor) -> Tensor:
    """The next x."""
    x1 = x + v
    return x1 if x1.dtype == x.dtype else x1.to(x.dtype)


def momentum(net: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The output of a `MomentumNet`."""
    form, first = net.form, net.velocity
    givers = _givers(net)
    if net.recurrence.in_evaluation.residual:
        plain = Residual(x, form)
        for block in net.blocks:
            plain.advance(0, block(plain.x, *args, **kwargs))
        return plain.x
    v = first(x) if callable(first) else None
    for k, (block, (_, _, gamma, gain)) in enumerate(zip(net.blocks, net.recurrence.factors, strict=True)):
        f = branch(x, givers[k](block, x, *args, **kwargs), form)
        if k == 0 and first == "first":
            v = f
        v = velocity(f, v, gamma, gain)
        x = moved(x, v)
    return x


def coupling(net: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The output of a `CouplingNet`."""
    dim = net.recurrence.dim
    check_halves(x, dim)
    streams = list(x.chunk(2, dim))
    for k, (block, give, r) in enumerate(zip(net.blocks, _givers(net), net.recurrence.squeezes, strict=True)):
        read = streams[1 - k % 2]
        streams[k % 2] = moved(streams[k % 2], give(block, read, *args, **kwargs))
        streams = [squeeze(stream, r) for stream in streams]
    return torch.cat(streams, dim)


def _givers(net: nn.Module) -> list[Giver]:
    givers: list[Giver] = getattr(net, GIVERS)
    blocks: Any = net.blocks
    if len(givers) != len(blocks):
        raise ValueError(
            f"the network has {len(blocks)} blocks now, and had {len(givers)} when it was deployed. Deploy it again."
        )
    return givers
