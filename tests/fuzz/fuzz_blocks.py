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
from problems import Of

WIDTH, LENGTH, CHANNELS, SIDE = 8, 5, 4, 5
Factory = Callable[[Random], nn.Module]
KINDS: dict[str, dict[str, Factory]] = {"vector": {}, "tokens": {}, "image": {}}
ONCE_ONLY = {"attention", "sdpa", "gru"}  # kinds without second derivatives everywhere
RANDOM = {"dropout", "noise", "attention", "sdpa", "batchnorm", "instancenorm", "batchnorm2d"}  # depend on more than x
WRITES = {"inplacefirst", "inplaceimage"}  # to their input
ACTIVATIONS: list[Any] = [torch.tanh, F.gelu, F.silu, F.relu, F.leaky_relu, torch.sin, F.softplus]


def kind(*layouts: str) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a factory under its name for these layouts."""

    def register(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        for layout in layouts:
            KINDS[layout][make.__name__.replace("_", "").lower()] = make
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
def single(rng: Random) -> nn.Module:
    """One linear map: its input is all it saves."""
    return nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.5)


@kind("vector", "tokens")
def pre_norm(rng: Random) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH, elementwise_affine=rng.random() < 0.7), Mlp(rng))


@kind("vector", "tokens")
def gated(rng: Random) -> nn.Module:
    return Of(lambda b, x: F.glu(b.gate(x), dim=-1), gate=nn.Linear(WIDTH, 2 * WIDTH))


@kind("vector", "tokens")
def dropout(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        return F.dropout(b.inner(F.dropout(x, 0.1, b.training)), b.rate, b.training)

    return Of(run, inner=Mlp(rng), rate=rng.choice([0.1, 0.5, 1.0]))


@kind("vector", "tokens")
def weight_normed(rng: Random) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


@kind("vector", "tokens")
def in_place_first(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        if b.how != "relu":
            x.mul_(0.5)
        return b.linear(x if b.how == "scale" else F.relu(x, inplace=True))

    return Of(run, linear=nn.Linear(WIDTH, WIDTH), how=rng.choice(["relu", "scale", "both"]))


@kind("vector", "tokens")
def in_place_last(rng: Random) -> nn.Module:
    return Of(lambda b, x: b.linear(x).tanh_().mul(0.7).add_(0.1), linear=nn.Linear(WIDTH, WIDTH))


@kind("vector", "tokens")
def branching(rng: Random) -> nn.Module:
    """Control flow that depends on the data."""

    def run(b: Any, x: Tensor) -> Tensor:
        return b.left(x) if x.numel() and x.detach().float().mean() > 0 else b.right(x)

    return Of(run, left=Mlp(rng), right=nn.Linear(WIDTH, WIDTH))


@kind("vector", "tokens")
def routed(rng: Random) -> nn.Module:
    """Only the rows that a condition picks are worked on: shapes depend on the data."""

    def run(b: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        picked = rows[:, 0] > 0
        out = torch.zeros_like(rows)
        out[picked] = b.expert(rows[picked]).to(out.dtype)
        return out.view_as(x)

    return Of(run, expert=nn.Linear(WIDTH, WIDTH))


@kind("vector", "tokens")
def partly_detached(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = x.abs().mean(-1, keepdim=True) if x.numel() else x
        return torch.tanh(b.linear(x.detach())) + 0.1 * x / (1 + size) if x.numel() else b.linear(x)

    return Of(run, linear=nn.Linear(WIDTH, WIDTH))


@kind("vector", "tokens")
def energy(rng: Random) -> nn.Module:
    """f(x) = −∇E(x), a gradient taken inside the block."""

    def run(b: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(b.energy(x).sum(), x, create_graph=True)[0]

    return Of(run, energy=nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1)))


@kind("vector", "tokens")
def checkpointed(rng: Random) -> nn.Module:
    return Of(lambda b, x: checkpoint(b.inner, x, use_reentrant=False), inner=Mlp(rng))


@kind("vector", "tokens")
def nested(rng: Random) -> nn.Module:
    """A momentum network inside a block of another."""
    memory = rng.choice(["reverse", "checkpoint", "store"])
    blocks = [Mlp(rng) for _ in range(rng.choice([1, 3]))]
    net = rg.MomentumNet(blocks, memory=memory, fixed_point=rg.FixedPoint(18, torch.int32))
    return Of(lambda b, x: b.net(x) - x, net=net)


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
def own_function(rng: Random) -> nn.Module:
    return Of(lambda b, x: _Cube.apply(x))


@kind("vector", "tokens", "image")
def noise(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng(enabled=b.forked):
            return torch.rand_like(x) * b.scale.to(x.dtype) * x

    return Of(run, scale=nn.Parameter(torch.tensor(0.1)), forked=rng.random() < 0.3)


@kind("vector", "tokens", "image")
def scale(rng: Random) -> nn.Module:
    """Saves nothing, has no parameters."""
    return Of(lambda b, x: x * b.by, by=rng.choice([0.5, -0.3, 0.0]))


@kind("vector", "tokens", "image")
def itself(rng: Random) -> nn.Module:
    """Returns its input, or a view of it."""
    return Of(lambda b, x: x.view_as(x) if b.view else x, view=rng.random() < 0.5)


@kind("vector", "tokens", "image")
def constant(rng: Random) -> nn.Module:
    """Does not look at its input; may not even need a gradient."""

    def run(b: Any, x: Tensor) -> Tensor:
        return torch.full_like(x, 0.01) if b.level is None else b.level.to(x.dtype).expand_as(x)

    return Of(run, level=nn.Parameter(torch.tensor(0.1)) if rng.random() < 0.5 else None)


@kind("vector", "tokens", "image")
def buffered(rng: Random) -> nn.Module:
    """Reads a buffer, and has parameters that it does not use."""

    def run(b: Any, x: Tensor) -> Tensor:
        return torch.sigmoid(x / b.temperature.to(x.dtype)) - 0.5

    block = Of(run, temperature=torch.tensor(0.7), unused=nn.Parameter(torch.zeros(3)))
    block.register_buffer("absent", None)
    return block


@kind("vector")
def batch_norm(rng: Random) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    momentum, affine, tracks = rng.choice([0.1, None]), rng.random() < 0.7, rng.random() < 0.8
    return nn.Sequential(linear, nn.BatchNorm1d(WIDTH, momentum=momentum, affine=affine, track_running_stats=tracks))


@kind("tokens")
def attention(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        h = b.norm(x)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=h.dtype) if b.causal else None
        return b.attention(h, h, h, need_weights=b.weights, attn_mask=mask)[0]

    heads = nn.MultiheadAttention(WIDTH, 2, dropout=rng.choice([0.0, 0.2]), batch_first=True)
    return Of(run, norm=nn.LayerNorm(WIDTH), attention=heads, weights=rng.random() < 0.3, causal=rng.random() < 0.3)


@kind("tokens")
def sdpa(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in b.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=b.rate if b.training else 0.0)
        return y.transpose(1, 2).flatten(2)

    return Of(run, qkv=nn.Linear(WIDTH, 3 * WIDTH), rate=rng.choice([0.0, 0.1]))


@kind("tokens")
def gru(rng: Random) -> nn.Module:
    return Of(lambda b, x: b.gru(x)[0], gru=nn.GRU(WIDTH, WIDTH, batch_first=True))


@kind("tokens")
def mixer(rng: Random) -> nn.Module:
    """Returns a tensor that is not contiguous."""
    return Of(lambda b, x: b.mix(x.transpose(1, 2)).transpose(1, 2), mix=nn.Linear(LENGTH, LENGTH))


@kind("image")
def conv(rng: Random) -> nn.Module:
    groups, bias = rng.choice([1, 2, CHANNELS]), rng.random() < 0.5
    inner = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=groups, bias=bias)
    return Of(lambda b, x: b.activation(b.conv(x)), conv=inner, activation=rng.choice(ACTIVATIONS))


@kind("image")
def batch_norm_2d(rng: Random) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS, momentum=rng.choice([0.1, None])),
        nn.ReLU(inplace=rng.random() < 0.5),
        nn.Conv2d(CHANNELS, CHANNELS, 1),
        nn.BatchNorm2d(CHANNELS, track_running_stats=rng.random() < 0.7),
    )


@kind("image")
def group_norm(rng: Random) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))


@kind("image")
def instance_norm(rng: Random) -> nn.Module:
    norm = nn.InstanceNorm2d(CHANNELS, affine=rng.random() < 0.5, track_running_stats=rng.random() < 0.5)
    return nn.Sequential(norm, nn.Conv2d(CHANNELS, CHANNELS, 1))


@kind("image")
def pooled(rng: Random) -> nn.Module:
    def run(b: Any, x: Tensor) -> Tensor:
        gate = b.excite(F.relu(b.squeeze(x.mean((2, 3)))))
        return x * torch.sigmoid(gate)[..., None, None] + 0.1 * F.max_pool2d(x, 3, 1, 1)

    return Of(run, squeeze=nn.Linear(CHANNELS, 2), excite=nn.Linear(2, CHANNELS))


@kind("image")
def in_place_image(rng: Random) -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1))


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
