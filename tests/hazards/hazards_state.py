"""Blocks with state: running statistics, buffers, caches, modes."""

from __future__ import annotations

import torch
from hazard_blocks import CHANNELS, WIDTH, Function, Mlp, batch, conv, image, mlps
from hazard_registry import Found, Setting, collect, hazard, square, step
from torch import Tensor, nn

THEME = "state of a block"


@hazard(THEME)
def batchnorm_training(h: Setting) -> Found:
    """BatchNorm in training: statistics move once"""
    return step(h.net([conv(nn.BatchNorm2d(CHANNELS)) for _ in range(4)], dim=1), image())


@hazard(THEME)
def batchnorm_cumulative(h: Setting) -> Found:
    """BatchNorm with momentum=None (cumulative average), three steps"""
    net = h.net([conv(nn.BatchNorm2d(CHANNELS, momentum=None)) for _ in range(4)], dim=1)
    for _ in range(2):
        net(image()).square().mean().backward()
    return step(net, image())


@hazard(THEME)
def batchnorm_evaluation(h: Setting) -> Found:
    """BatchNorm in eval mode: running statistics are used, and must not move"""
    return step(h.net([conv(nn.BatchNorm2d(CHANNELS)) for _ in range(4)], dim=1).eval(), image())


@hazard(THEME)
def batchnorm_shared(h: Setting) -> Found:
    """one BatchNorm in several blocks"""
    norm = nn.BatchNorm1d(WIDTH)
    return step(h.net([nn.Sequential(nn.Linear(WIDTH, WIDTH), norm) for _ in range(4)]), batch(6))


@hazard(THEME)
def instancenorm_statistics(h: Setting) -> Found:
    """InstanceNorm with running statistics"""
    norms = [nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True) for _ in range(4)]
    return step(h.net([conv(norm) for norm in norms], dim=1), image())


@hazard(THEME)
def batchnorm_second_order(h: Setting) -> Found:
    """BatchNorm under create_graph"""
    net, x = h.net([nn.Sequential(nn.BatchNorm1d(WIDTH), Mlp()) for _ in range(4)]), batch(6)
    (gradient,) = torch.autograd.grad(square(net(x)), x, create_graph=True)
    gradient.square().sum().backward()
    return collect(net, penalised=gradient.detach())


class Ema(nn.Module):
    """Scales by a running mean of its own output."""

    mean: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(WIDTH, WIDTH), in_place
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        new = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return y * (1 + self.mean)


@hazard(THEME)
def buffer_replaced(h: Setting) -> Found:
    """an EMA buffer that forward replaces and uses"""
    return step(h.net([Ema(False) for _ in range(4)]), batch())


@hazard(THEME)
def buffer_updated(h: Setting) -> Found:
    """an EMA buffer that forward updates in place and uses"""
    return step(h.net([Ema(True) for _ in range(4)]), batch())


@hazard(THEME)
def spectral_norm(h: Setting) -> Found:
    """spectral norm in training: power iteration moves its vectors"""
    blocks = [
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)
    ]
    return step(h.net(blocks), batch())


@hazard(THEME)
def spectral_norm_evaluation(h: Setting) -> Found:
    """spectral norm in eval mode"""
    blocks = [
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)
    ]
    return step(h.net(blocks).eval(), batch())


@hazard(THEME)
def quantisation_observer(h: Setting) -> Found:
    """an observer that tracks the largest |x| and quantises by it"""

    class Observed(Mlp):
        largest: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.largest.copy_(torch.maximum(0.9 * self.largest, y.detach().abs().max()))
            scale = float(self.largest) / 127 + 1e-8
            return torch.fake_quantize_per_tensor_affine(y, scale, 0, -127, 127)

    net = h.net([Observed() for _ in range(4)])
    net(4 * batch().detach())
    return step(net, batch())


@hazard(THEME)
def attribute_counts_calls(h: Setting) -> Found:
    """a plain attribute that counts calls, and scales the output"""

    class Counting(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    return step(h.net([Counting() for _ in range(4)]), batch())


@hazard(THEME)
def tensor_attribute_updated(h: Setting) -> Found:
    """a tensor that is no buffer, updated by forward"""

    class Hidden(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.memory = [torch.zeros(WIDTH)]

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + self.memory[0]
            self.memory[0] = 0.5 * self.memory[0] + 0.5 * y.detach().mean(0)
            return y

    return step(h.net([Hidden() for _ in range(4)]), batch())


@hazard(THEME)
def list_of_the_block_appended_to(h: Setting) -> Found:
    """a block that appends to a list of its own and reads its length"""

    class Appending(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(float(x.detach().mean()))
            return super().forward(x) * (1 + 0.1 * len(self.seen))

    net = h.net([Appending() for _ in range(4)])
    found = step(net, batch()) | step(net, batch())
    lengths = [float(len(m.seen)) for m in net.modules() if isinstance(m, Appending)]
    return found | {"lengths": torch.tensor(lengths)}


@hazard(THEME)
def growing_cache(h: Setting) -> Found:
    """a cache that grows with every call, as for keys and values"""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cache = nn.Linear(WIDTH, WIDTH), torch.zeros(0, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.cat([self.cache, x.detach()])
            return 0.1 * torch.tanh(self.linear(x) @ self.cache.T) @ self.cache

    return step(h.net([Cached() for _ in range(4)]), batch())


@hazard(THEME)
def table_made_on_first_use(h: Setting) -> Found:
    """a table made on first use and kept, as for rotary embeddings"""

    class Rotary(Mlp):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, WIDTH).cos()
            return super().forward(x * self.table)

    return step(h.net([Rotary() for _ in range(4)]), batch())


@hazard(THEME)
def weight_norm(h: Setting) -> Found:
    """weight normalisation (a parametrisation)"""
    blocks = [
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(4)
    ]
    return step(h.net(blocks), batch())


@hazard(THEME)
def lazy_layers(h: Setting) -> Found:
    """lazy layers, made on the first batch"""
    return step(h.net([nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()) for _ in range(4)]), batch())


@hazard(THEME)
def auxiliary_loss(h: Setting) -> Found:
    """a loss that a block leaves on itself (mixture of experts)"""

    class Auxiliary(Mlp):
        loss: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.loss = y.square().mean()
            return y

    blocks = [Auxiliary() for _ in range(4)]
    net = h.net(list(blocks))
    return step(net, batch(), loss=lambda y: square(y) + sum(b.loss for b in blocks))


@hazard(THEME)
def mode_switched_between(h: Setting) -> Found:
    """net.eval() between forward and backward"""
    net = h.net([nn.Sequential(nn.BatchNorm1d(WIDTH), Mlp(), nn.Dropout(0.3)) for _ in range(4)])
    return step(net, batch(), between=net.eval)


@hazard(THEME)
def mutable_configuration_changed_between(h: Setting) -> Found:
    """a setting that blocks read from a shared object, changed between forward and backward"""
    configuration = {"scale": 1.0}
    blocks = [nn.Sequential(Mlp(), Function(lambda x: x * configuration["scale"])) for _ in range(4)]
    return step(h.net(blocks), batch(), between=lambda: configuration.update(scale=0.5))


@hazard(THEME)
def control_flow_on_data(h: Setting) -> Found:
    """control flow that depends on the data"""

    def bent(x: Tensor) -> Tensor:
        return x.sin() if x.detach().mean() > 0 else x * 0.5

    return step(h.net([nn.Sequential(Mlp(), Function(bent)) for _ in range(6)]), batch())


@hazard(THEME)
def shapes_from_data(h: Setting) -> Found:
    """routing: how many rows an expert sees depends on the data"""

    class Routed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            picked, out = x[:, 0] > 0, torch.zeros_like(x)
            out[picked] = super().forward(x[picked])
            return out

    return step(h.net([Routed() for _ in range(6)]), batch(8))


@hazard(THEME)
def several_batch_sizes(h: Setting) -> Found:
    """batches of several sizes, forward passes first"""
    net = h.net(mlps(4))
    losses = [square(net(batch(rows))) for rows in (2, 7, 1)]
    torch.stack(losses).sum().backward()
    return collect(net)
