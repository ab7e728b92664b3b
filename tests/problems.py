"""Networks and recurrences whose answers are known, and the comparisons that every test uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.reverse.range import holders

KNOWN_INSIDE = torch.backends.cpu.get_cpu_capability() != "AVX2"
"""Whether it is known what oneDNN takes inside of its convolutions and 16-bit products on this CPU (`memory.fake.workspace`)."""


class Of(nn.Module):
    """A module whose forward is a function of itself and its inputs, and what it has: tensors are its buffers."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class Mlp(nn.Module):
    """f(x) = W₂ᵀ tanh(W₁x + b), the paper's."""

    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def conv(channels: int = 4) -> nn.Sequential:
    """conv-bn-relu-conv-bn."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
    )  # fmt: skip


class Attention(nn.Module):
    """Pre-norm attention with dropout on the weights and on the output."""

    def __init__(self, width: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.dropout(self.attention(h, h, h, need_weights=False)[0])


class Residual(nn.Module):
    """x + f(x), or relu(x + f(x))."""

    def __init__(self, f: nn.Module, rectify: bool = False) -> None:
        super().__init__()
        self.f, self.rectify = f, rectify

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = x + self.f(x, *args, **kwargs)
        return torch.relu(y) if self.rectify else y


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (3, 8)),
    "conv+batchnorm": (conv, (2, 4, 5, 5)),
    "attention+dropout": (Attention, (2, 5, 8)),
}


def stack(kind: str, depth: int) -> tuple[list[nn.Module], Tensor]:
    """Blocks of a kind and an input for them."""
    make, shape = KINDS[kind]
    return [make() for _ in range(depth)], torch.randn(shape)


def train_step(
    net: nn.Module, x: Tensor, *args: Any, loss: Callable[[Tensor], Tensor] = lambda y: y.square().mean(), **kwargs: Any
) -> dict[str, Tensor]:
    """Output, every gradient and every buffer of one step on a copy of the network, from the same random state."""
    net = copy.deepcopy(net)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(7)
    y = net(x, *args, **kwargs)
    loss(y).backward()
    found = {"output": y.detach(), "next random": torch.rand(1)}
    found |= {"input": x.grad} if x.grad is not None else {}
    found |= {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": b for name, b in net.named_buffers()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"different bits in {different[:5]} of {len(a)}"


def same_in_every_mode(net: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Check that "reverse" and "checkpoint" give the bits of "store", of a network or of those inside."""
    found = {}
    for mode in ("store", "reverse", "checkpoint"):
        for _, part in holders(net):
            part.memory = mode
        found[mode] = train_step(net, x, *args, **kwargs)
    assert_same_bits(found["store"], found["reverse"])
    assert_same_bits(found["store"], found["checkpoint"])
    return found["store"]


def fitted(net: nn.Module, loss: Callable[[], Tensor], rate: float, steps: int) -> list[float]:
    """The losses of training."""
    optimizer, losses = torch.optim.Adam(net.parameters(), rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        now = loss()
        now.backward()
        optimizer.step()
        losses.append(float(now.detach()))
    return losses


def float_recurrence(blocks: Iterable[nn.Module], gamma: Fraction, x: Tensor, form: str = "branch") -> Tensor:
    """The momentum network in floats, by autograd alone."""
    v = torch.zeros_like(x)
    gain = float(1 - gamma) if gamma < 1 else 1.0
    for block in blocks:
        y = block(x)
        f = y if form == "branch" else (y if form == "block" else torch.relu(x + y)) - x
        v = float(gamma) * v + gain * f
        x = x + v
    return x
