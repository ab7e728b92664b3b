"""Blocks for random networks: one small module per thing that could make a replay differ from the first run.

`KINDS[layout]` maps a name to a factory; a block maps a tensor of the layout to one of the same shape.

    vector   (batch, WIDTH)        tokens   (batch, LENGTH, WIDTH)        image   (batch, CHANNELS, SIDE, SIDE)
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import retrograde as rg

WIDTH, LENGTH, CHANNELS, SIDE = 8, 5, 4, 5
Factory = Callable[[Random], nn.Module]
KINDS: dict[str, dict[str, Factory]] = {"vector": {}, "tokens": {}, "image": {}}
ONCE_ONLY = {"attention", "sdpa", "gru"}  # kinds without second derivatives everywhere
RANDOM = {
    "dropout",
    "noise",
    "attention",
    "sdpa",
    "batchnorm",
    "instancenorm",
    "batchnorm2d",
}  # not a function of x alone
WRITES = {"inplacefirst", "inplaceimage"}  # to their input
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    F.gelu,
    F.silu,
    F.relu,
    F.leaky_relu,
    torch.sin,
    F.softplus,
]


def kind(*layouts: str) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a factory under its name for these layouts."""

    def register(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        for layout in layouts:
            KINDS[layout][make.__name__.lower()] = make
        return make

    return register


@kind("vector", "tokens")
class Mlp(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        hidden = rng.choice([1, 4, 12, 16])
        self.inner, self.outer = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=rng.random() < 0.5)
        self.activation = rng.choice(ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.activation(self.inner(x)))


@kind("vector", "tokens")
class Single(nn.Linear):
    """One linear map: its input is all it saves."""

    def __init__(self, rng: Random) -> None:
        super().__init__(WIDTH, WIDTH, bias=rng.random() < 0.5)


@kind("vector", "tokens")
class PreNorm(nn.Sequential):
    def __init__(self, rng: Random) -> None:
        super().__init__(nn.LayerNorm(WIDTH, elementwise_affine=rng.random() < 0.7), Mlp(rng))


@kind("vector", "tokens")
class Gated(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.gate(x), dim=-1)


@kind("vector", "tokens")
class Dropout(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.inner, self.rate = Mlp(rng), rng.choice([0.1, 0.5, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(F.dropout(x, 0.1, self.training)), self.rate, self.training)


@kind("vector", "tokens")
class WeightNormed(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@kind("vector", "tokens")
class InPlaceFirst(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), rng.choice(["relu", "scale", "both"])

    def forward(self, x: Tensor) -> Tensor:
        if self.how != "relu":
            x.mul_(0.5)
        return self.linear(x if self.how == "scale" else F.relu(x, inplace=True))


@kind("vector", "tokens")
class InPlaceLast(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh_().mul(0.7).add_(0.1)


@kind("vector", "tokens")
class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.left, self.right = Mlp(rng), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.numel() and x.detach().float().mean() > 0 else self.right(x)


@kind("vector", "tokens")
class Routed(nn.Module):
    """Only the rows that a condition picks are worked on: shapes depend on the data."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        picked = rows[:, 0] > 0
        out = torch.zeros_like(rows)
        out[picked] = self.expert(rows[picked]).to(out.dtype)
        return out.view_as(x)


@kind("vector", "tokens")
class PartlyDetached(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.abs().mean(-1, keepdim=True) if x.numel() else x
        return torch.tanh(self.linear(x.detach())) + 0.1 * x / (1 + size) if x.numel() else self.linear(x)


@kind("vector", "tokens")
class Energy(nn.Module):
    """f(x) = −∇E(x), a gradient taken inside the block."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@kind("vector", "tokens")
class Checkpointed(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.inner = Mlp(rng)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@kind("vector", "tokens")
class Nested(nn.Module):
    """A momentum network inside a block of another."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        memory = rng.choice(["reverse", "checkpoint", "store"])
        self.net = rg.MomentumNet(
            [Mlp(rng) for _ in range(rng.choice([1, 3]))], memory=memory, fixed_point=rg.FixedPoint(18, torch.int32)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) - x


class _Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.detach() * 2)
        return 0.1 * torch.tanh(x) ** 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        t = torch.tanh(x)
        return g * 0.3 * t**2 * (1 - t**2)


@kind("vector", "tokens", "image")
class OwnFunction(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x)


@kind("vector", "tokens", "image")
class Noise(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.scale, self.forked = nn.Parameter(torch.tensor(0.1)), rng.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(enabled=self.forked):
            return torch.rand_like(x) * self.scale.to(x.dtype) * x


@kind("vector", "tokens", "image")
class Scale(nn.Module):
    """Saves nothing, has no parameters."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.by = rng.choice([0.5, -0.3, 0.0])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@kind("vector", "tokens", "image")
class Itself(nn.Module):
    """Returns its input, or a view of it."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.view = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x.view_as(x) if self.view else x


@kind("vector", "tokens", "image")
class Constant(nn.Module):
    """Does not look at its input; may not even need a gradient."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.1)) if rng.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 0.01) if self.level is None else self.level.to(x.dtype).expand_as(x)


@kind("vector", "tokens", "image")
class Buffered(nn.Module):
    """Reads a buffer, and has parameters that it does not use."""

    temperature: Tensor

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(0.7))
        self.register_buffer("absent", None)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x / self.temperature.to(x.dtype)) - 0.5


@kind("vector")
class BatchNorm(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(
            WIDTH, momentum=rng.choice([0.1, None]), affine=rng.random() < 0.7, track_running_stats=rng.random() < 0.8
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@kind("tokens")
class Attention(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=rng.choice([0.0, 0.2]), batch_first=True)
        self.weights, self.causal = rng.random() < 0.3, rng.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=h.dtype) if self.causal else None
        return self.attention(h, h, h, need_weights=self.weights, attn_mask=mask)[0]


@kind("tokens")
class Sdpa(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.qkv, self.rate = nn.Linear(WIDTH, 3 * WIDTH), rng.choice([0.0, 0.1])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate if self.training else 0.0)
        return y.transpose(1, 2).flatten(2)


@kind("tokens")
class Gru(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


@kind("tokens")
class Mixer(nn.Module):
    """Returns a tensor that is not contiguous."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


@kind("image")
class Conv(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        groups = rng.choice([1, 2, CHANNELS])
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups, bias=rng.random() < 0.5)
        self.activation = rng.choice(ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.conv(x))


@kind("image")
class BatchNorm2d(nn.Sequential):
    def __init__(self, rng: Random) -> None:
        super().__init__(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS, momentum=rng.choice([0.1, None])),
            nn.ReLU(inplace=rng.random() < 0.5),
            nn.Conv2d(CHANNELS, CHANNELS, 1),
            nn.BatchNorm2d(CHANNELS, track_running_stats=rng.random() < 0.7),
        )


@kind("image")
class GroupNorm(nn.Sequential):
    def __init__(self, rng: Random) -> None:
        super().__init__(nn.GroupNorm(2, CHANNELS), nn.SiLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))


@kind("image")
class InstanceNorm(nn.Sequential):
    def __init__(self, rng: Random) -> None:
        norm = nn.InstanceNorm2d(CHANNELS, affine=rng.random() < 0.5, track_running_stats=rng.random() < 0.5)
        super().__init__(norm, nn.Conv2d(CHANNELS, CHANNELS, 1))


@kind("image")
class Pooled(nn.Module):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(CHANNELS, 2), nn.Linear(2, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.excite(F.relu(self.squeeze(x.mean((2, 3)))))
        return x * torch.sigmoid(pooled)[..., None, None] + 0.1 * F.max_pool2d(x, 3, 1, 1)


@kind("image")
class InPlaceImage(nn.Sequential):
    def __init__(self, rng: Random) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))


class Residual(nn.Module):
    """x + f(x), on a copy: f may write to its input."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + self.branch(x.clone(), *args, **kwargs)


class Conditioned(nn.Module):
    """A block that is given more than x."""

    def __init__(self, inner: nn.Module, gain: float) -> None:
        super().__init__()
        self.inner, self.gain = inner, gain

    def forward(self, x: Tensor, *args: Any, scale: Tensor | None = None, **kwargs: Any) -> Tensor:
        y = self.inner(x)
        for a in args:
            if isinstance(a, dict):
                y = y + self.gain * torch.sin(a["memory"]).to(y.dtype) * a["by"]
            elif isinstance(a, Tensor):
                y = y + self.gain * torch.tanh(a).to(y.dtype)
        return y if scale is None else y * scale.to(y.dtype)
