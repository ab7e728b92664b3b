"""Precision: autocast, dtypes, large and small numbers, depth, γ."""

from __future__ import annotations

import contextlib

import torch
from hazard_blocks import WIDTH, Function, Mlp, batch, mlps
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn

THEME = "precision and range"
COARSE = 0.05  # bfloat16 has three digits


def _autocast(h: Setting, dtype: torch.dtype, inside: bool, depth: int = 50) -> Found:
    net, x = h.net(mlps(depth)), batch()
    with torch.autocast("cpu", dtype=dtype):
        loss = square(net(x))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return collect(net, gradient_of_input=x.grad if x.grad is not None else torch.zeros(()))


@hazard(THEME, near=COARSE)
def autocast_bfloat16_backward_outside(h: Setting) -> Found:
    """autocast to bfloat16, depth 50, backward outside of it"""
    return _autocast(h, torch.bfloat16, inside=False)


@hazard(THEME, near=COARSE)
def autocast_bfloat16_backward_inside(h: Setting) -> Found:
    """autocast to bfloat16, depth 50, backward inside of it"""
    return _autocast(h, torch.bfloat16, inside=True)


@hazard(THEME, near=COARSE)
def autocast_float16(h: Setting) -> Found:
    """autocast to float16, backward outside"""
    return _autocast(h, torch.float16, inside=False, depth=12)


@hazard(THEME, near=COARSE)
def autocast_disabled_inside(h: Setting) -> Found:
    """a block that disables autocast for a part of itself"""

    class Careful(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                y = torch.tanh(y.float())
            return self.outer(y)

    net, x = h.net([Careful() for _ in range(12)]), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = square(net(x))
    loss.backward()
    return collect(net)


@hazard(THEME, near=COARSE)
def autocast_nested_inside(h: Setting) -> Found:
    """a block that enters autocast by itself"""

    class Half(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = super().forward(x)
            return y.float()

    return step(h.net([Half() for _ in range(12)]), batch())


@hazard(THEME, near=COARSE)
def autocast_two_dtypes(h: Setting) -> Found:
    """one network under bfloat16, then under float16, backwards afterwards"""
    net, losses = h.net(mlps(6)), []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            losses.append(square(net(batch())))
    torch.stack(losses).sum().backward()
    return collect(net)


@hazard(THEME, near=COARSE)
def loss_scaling_with_overflow(h: Setting) -> Found:
    """GradScaler: the first scale overflows, the step is skipped, the next ones are taken"""
    net = h.net(mlps(6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-126)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 100 * net(batch()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return collect(net, scale=torch.tensor(scaler.get_scale())) | {
        f"p{k}": p.detach() for k, p in enumerate(net.parameters())
    }


def _module(h: Setting, dtype: torch.dtype) -> Found:
    return step(h.net(mlps(12)).to(dtype), torch.randn(3, WIDTH).to(dtype).requires_grad_())


@hazard(THEME, near=1e-9)
def float64_modules(h: Setting) -> Found:
    """float64 modules, right to float64"""
    return _module(h, torch.float64)


@hazard(THEME, near=COARSE)
def bfloat16_modules(h: Setting) -> Found:
    """bfloat16 modules"""
    return _module(h, torch.bfloat16)


@hazard(THEME, near=COARSE)
def float16_modules(h: Setting) -> Found:
    """float16 modules"""
    return _module(h, torch.float16)


@hazard(THEME)
def default_dtype_changed(h: Setting) -> Found:
    """torch.set_default_dtype between forward and backward"""
    return step(h.net(mlps(4)), batch(), between=lambda: torch.set_default_dtype(torch.float64))


@hazard(THEME)
def massive_activations(h: Setting) -> Found:
    """|x| = 1e5 in two channels, as language models have"""
    x = torch.randn(3, WIDTH)
    x[:, :2] *= 1e5
    return step(h.net([nn.Sequential(nn.LayerNorm(WIDTH), Mlp()) for _ in range(12)]), x.requires_grad_())


@hazard(THEME)
def tiny_activations(h: Setting) -> Found:
    """|x| = 1e-6, scaled so inside the blocks"""
    x = (torch.randn(3, WIDTH) * 1e-6).requires_grad_()
    return step(
        h.net([nn.Sequential(Mlp(), Function(lambda y: y * 1e-6)) for _ in range(6)]), x, loss=lambda y: y.sum()
    )


@hazard(THEME)
def nan_from_a_block(h: Setting) -> Found:
    """NaN out of a block"""
    blocks = mlps(4)
    blocks[2] = nn.Sequential(Mlp(), Function(lambda y: y / torch.zeros_like(y) * 0))
    return step(h.net(blocks), batch())


@hazard(THEME)
def inf_from_a_block(h: Setting) -> Found:
    """Inf out of a block"""
    blocks = mlps(4)
    blocks[2] = nn.Sequential(Mlp(), Function(lambda y: (y + 200).exp()))
    return step(h.net(blocks), batch())


@hazard(THEME)
def activations_that_grow(h: Setting) -> Found:
    """activations that grow tenfold per block, to 1e20"""
    blocks: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(20)]
    for block in blocks:
        nn.init.orthogonal_(block.weight, gain=10.0)  # type: ignore[arg-type]
    return step(h.net(blocks), batch(), loss=lambda y: y.mean())


@hazard(THEME)
def scale_drifts(h: Setting) -> Found:
    """activations that grow a thousandfold over 30 steps"""
    net, found = h.net(mlps(4)), Found()
    for k in range(30):
        net.zero_grad()
        found = step(net, (batch().detach() * 10 ** (k / 10)).requires_grad_())
    return found


@hazard(THEME)
def scale_jumps(h: Setting) -> Found:
    """one batch a million times as large as those before"""
    net = h.net([nn.Sequential(nn.LayerNorm(WIDTH), Mlp()) for _ in range(6)])
    for _ in range(2):
        square(net(batch())).backward()
    net.zero_grad()
    return step(net, (batch().detach() * 1e6).requires_grad_())


@hazard(THEME)
def depth_200(h: Setting) -> Found:
    """depth 200"""
    return step(h.net(mlps(200, gain=0.3)), batch())


@hazard(THEME)
def depth_1000(h: Setting) -> Found:
    """depth 1,000"""
    return step(h.net(mlps(1000, gain=0.1)), batch())


@hazard(THEME)
def gamma_half(h: Setting) -> Found:
    """γ = 1/2, depth 60"""
    return step(h.net(mlps(60, gain=0.5), gamma=0.5), batch())


@hazard(THEME)
def gamma_small(h: Setting) -> Found:
    """γ = 1/100, depth 30"""
    return step(h.net(mlps(30, gain=0.3), gamma=0.01), batch())


@hazard(THEME)
def gamma_near_one(h: Setting) -> Found:
    """γ = 1 − 1e-5, depth 60"""
    return step(h.net(mlps(60), gamma=1 - 1e-5), batch())


@hazard(THEME)
def gamma_one(h: Setting) -> Found:
    """γ = 1: v ← v + f(x)"""
    return step(h.net(mlps(20, gain=0.1), gamma=1.0), batch())


@hazard(THEME)
def gamma_per_layer(h: Setting) -> Found:
    """another γ in every layer"""
    return step(h.net(mlps(6), gamma=[0.9, 0.5, 0.99, 0.1, 1.0, 0.75]), batch())


@hazard(THEME)
def initial_velocity(h: Setting) -> Found:
    """a learned initial velocity"""
    return step(h.net(mlps(6), velocity=Mlp()), batch())


@hazard(THEME)
def residual_blocks(h: Setting) -> Found:
    """blocks that compute x + f(x) themselves"""

    class Residual(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    return step(h.net([Residual() for _ in range(6)], form="block"), batch())


@hazard(THEME)
def dtypes_of_results(h: Setting) -> Found:
    """dtypes of output and gradients, in every precision"""
    found = Found()
    for dtype, autocast in [(torch.float64, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]:
        net, x = h.net(mlps(2)).to(dtype), batch().detach().to(dtype).requires_grad_()
        with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
            y = net(x)
        y.sum().backward()
        tensors = [y, x.grad, *(p.grad for p in net.parameters())]
        sizes = [0 if t is None else t.dtype.itemsize for t in tensors]
        found[f"item sizes {dtype}, {autocast}"] = torch.tensor(sizes)
    return found
