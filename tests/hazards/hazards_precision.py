"""Precision: autocast, dtypes, large and small numbers, depth, γ."""

from __future__ import annotations

import contextlib

import torch
from hazard_blocks import WIDTH, Function, Mlp, Own, batch, mlps, several, then
from hazard_registry import Found, Theme, collect, given, near, square, step
from torch import Tensor, nn

COARSE = 0.05  # bfloat16 has three digits


def autocast(h: Theme, blocks: list[nn.Module], dtype: torch.dtype = torch.bfloat16, inside: bool = False) -> Found:
    """A step under autocast, with backward inside or outside of it."""
    net, x = h.net(blocks), batch()
    with torch.autocast("cpu", dtype=dtype):
        loss = square(net(x))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return collect(net, gradient_of_input=given(x))


def careful(block: Own, x: Tensor) -> Tensor:
    y = block.inner(x)
    with torch.autocast("cpu", enabled=False):
        y = torch.tanh(y.float())
    return block.outer(y)


def half(block: Own, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block.f(x)
    return y.float()


def cast(h: Theme, dtype: torch.dtype) -> Found:
    return step(h.net(mlps(12)).to(dtype), torch.randn(3, WIDTH).to(dtype).requires_grad_())


def at_scale(h: Theme, scale: float) -> Found:
    """Linear blocks in float64 on |x| of this scale."""
    net = h.net(several(lambda: nn.Linear(WIDTH, WIDTH, bias=False))).double()
    return step(net, (scale * batch().double()).detach(), loss=lambda y: (y / scale).square().mean())


def spoilt(h: Theme, spoil: Function) -> Found:
    blocks = mlps()
    blocks[2] = nn.Sequential(Mlp(), spoil)
    return h.step(blocks)


def normed(depth: int) -> list[nn.Module]:
    return several(lambda: nn.Sequential(nn.LayerNorm(WIDTH), Mlp()), depth)


class Precision(Theme):
    theme = "precision and range"

    @near(COARSE)
    def autocast_bfloat16_backward_outside(self) -> Found:
        """autocast to bfloat16, depth 50, backward outside of it"""
        return autocast(self, mlps(50))

    @near(COARSE)
    def autocast_bfloat16_backward_inside(self) -> Found:
        """autocast to bfloat16, depth 50, backward inside of it"""
        return autocast(self, mlps(50), inside=True)

    @near(COARSE)
    def autocast_float16(self) -> Found:
        """autocast to float16, backward outside"""
        return autocast(self, mlps(12), torch.float16)

    @near(COARSE)
    def autocast_disabled_inside(self) -> Found:
        """a block that disables autocast for a part of itself"""
        return autocast(self, several(lambda: Own(careful), 12))

    @near(COARSE)
    def autocast_nested_inside(self) -> Found:
        """a block that enters autocast by itself"""
        return self.step(several(lambda: Own(half), 12))

    @near(COARSE)
    def autocast_two_dtypes(self) -> Found:
        """one network under bfloat16, then under float16, backwards afterwards"""
        net, losses = self.net(mlps(6)), []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                losses.append(square(net(batch())))
        torch.stack(losses).sum().backward()
        return collect(net)

    @near(COARSE)
    def loss_scaling_with_overflow(self) -> Found:
        """GradScaler: the first scale overflows, the step is skipped, the next ones are taken"""
        net = self.net(mlps(6))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-126)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = 100 * net(batch()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        moved = {f"p{k}": p.detach() for k, p in enumerate(net.parameters())}
        return collect(net, scale=torch.tensor(scaler.get_scale())) | moved

    @near(1e-9)
    def float64_modules(self) -> Found:
        """float64 modules, right to float64"""
        return cast(self, torch.float64)

    @near(COARSE)
    def bfloat16_modules(self) -> Found:
        """bfloat16 modules"""
        return cast(self, torch.bfloat16)

    @near(COARSE)
    def float16_modules(self) -> Found:
        """float16 modules"""
        return cast(self, torch.float16)

    def default_dtype_changed(self) -> Found:
        """torch.set_default_dtype between forward and backward"""
        return self.step(mlps(), between=lambda: torch.set_default_dtype(torch.float64))

    def massive_activations(self) -> Found:
        """|x| = 1e5 in two channels, as language models have"""
        x = torch.randn(3, WIDTH)
        x[:, :2] *= 1e5
        return self.step(normed(12), x.requires_grad_())

    def tiny_activations(self) -> Found:
        """|x| = 1e-6, scaled so inside the blocks"""
        x = (torch.randn(3, WIDTH) * 1e-6).requires_grad_()
        return self.step(several(lambda: then(lambda y: y * 1e-6), 6), x, loss=lambda y: y.sum())

    def nan_from_a_block(self) -> Found:
        """NaN out of a block"""
        return spoilt(self, Function(lambda y: y / torch.zeros_like(y) * 0))

    def inf_from_a_block(self) -> Found:
        """Inf out of a block"""
        return spoilt(self, Function(lambda y: (y + 200).exp()))

    def activations_that_grow(self) -> Found:
        """activations that grow tenfold per block, to 1e20"""
        blocks = several(lambda: nn.Linear(WIDTH, WIDTH, bias=False), 20)
        for block in blocks:
            nn.init.orthogonal_(block.weight, gain=10.0)
        return self.step(blocks, loss=lambda y: y.mean())

    def scale_drifts(self) -> Found:
        """activations that grow a thousandfold over 30 steps"""
        net, found = self.net(mlps()), Found()
        for k in range(30):
            net.zero_grad()
            found = step(net, (batch().detach() * 10 ** (k / 10)).requires_grad_())
        return found

    def scale_jumps(self) -> Found:
        """one batch a million times as large as those before"""
        net = self.net(normed(6))
        for _ in range(2):
            square(net(batch())).backward()
        net.zero_grad()
        return step(net, (batch().detach() * 1e6).requires_grad_())

    def depth_200(self) -> Found:
        """depth 200"""
        return self.step(mlps(200, gain=0.3))

    def depth_1000(self) -> Found:
        """depth 1,000"""
        return self.step(mlps(1000, gain=0.1))

    def gamma_half(self) -> Found:
        """γ = 1/2, depth 60"""
        return self.step(mlps(60, gain=0.5), net={"gamma": 0.5})

    def gamma_small(self) -> Found:
        """γ = 1/100, depth 30"""
        return self.step(mlps(30, gain=0.3), net={"gamma": 0.01})

    def gamma_near_one(self) -> Found:
        """γ = 1 − 1e-5, depth 60"""
        return self.step(mlps(60), net={"gamma": 1 - 1e-5})

    def gamma_one(self) -> Found:
        """γ = 1: v ← v + f(x)"""
        return self.step(mlps(20, gain=0.1), net={"gamma": 1.0})

    def gamma_per_layer(self) -> Found:
        """another γ in every layer"""
        return self.step(mlps(6), net={"gamma": [0.9, 0.5, 0.99, 0.1, 1.0, 0.75]})

    def initial_velocity(self) -> Found:
        """a learned initial velocity"""
        return self.step(mlps(6), net={"velocity": Mlp()})

    def residual_blocks(self) -> Found:
        """blocks that compute x + f(x) themselves"""
        return self.step(several(lambda: Own(lambda block, x: x + block.f(x)), 6), net={"form": "block"})

    def dtypes_of_results(self) -> Found:
        """dtypes of output and gradients, in every precision"""
        found = Found()
        for dtype, inner in [(torch.float64, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]:
            net, x = self.net(mlps(2)).to(dtype), batch().detach().to(dtype).requires_grad_()
            with contextlib.nullcontext() if inner is None else torch.autocast("cpu", dtype=inner):
                y = net(x)
            y.sum().backward()
            sizes = [0 if t is None else t.dtype.itemsize for t in [y, x.grad, *(p.grad for p in net.parameters())]]
            found[f"item sizes {dtype}, {inner}"] = torch.tensor(sizes)
        return found

    def float64_very_small(self) -> Found:
        """float64 with |x| = 1e-46"""
        return at_scale(self, 1e-46)

    def float64_very_large(self) -> Found:
        """float64 with |x| = 1e39"""
        return at_scale(self, 1e39)
