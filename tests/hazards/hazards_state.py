"""Blocks with state: running statistics, buffers, caches, modes."""

from __future__ import annotations

import torch
from hazard_blocks import CHANNELS, WIDTH, Mlp, Own, batch, conv, image, mlps, several, then
from hazard_registry import Found, Theme, collect, square, step
from torch import Tensor, nn
from torch.nn.utils import parametrizations

IMAGES = {"dim": 1}


def normalised() -> list[nn.Module]:
    return several(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Mlp()))


def spectral_normed() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def averaging(in_place: bool) -> list[nn.Module]:
    """Blocks that scale by a running mean of their own output."""

    def body(block: Own, x: Tensor) -> Tensor:
        y = torch.tanh(block.inner(x))
        new = 0.5 * block.mean + 0.5 * y.detach().mean(0)
        if in_place:
            block.mean.copy_(new)
        else:
            block.mean = new
        return block.outer(y * (1 + block.mean))

    return several(lambda: Own(body, mean=torch.zeros(12)))


def functional_norm(block: Own, x: Tensor) -> Tensor:
    y = torch.nn.functional.batch_norm(block.inner(x), block.mean, block.var, training=True)
    return block.outer(y * (1 + block.mean.tanh()))


def observed(block: Own, x: Tensor) -> Tensor:
    y = block.f(x)
    block.largest.copy_(torch.maximum(0.9 * block.largest, y.detach().abs().max()))
    return torch.fake_quantize_per_tensor_affine(y, float(block.largest) / 127 + 1e-8, 0, -127, 127)


def counting(block: Own, x: Tensor) -> Tensor:
    block.calls += 1
    return block.f(x) * (1 + 0.1 * block.calls)


def remembering(block: Own, x: Tensor) -> Tensor:
    y = block.f(x) + block.memory[0]
    block.memory[0] = 0.5 * block.memory[0] + 0.5 * y.detach().mean(0)
    return y


def appending(block: Own, x: Tensor) -> Tensor:
    block.seen.append(float(x.detach().mean()))
    return block.f(x) * (1 + 0.1 * len(block.seen))


def rotary(block: Own, x: Tensor) -> Tensor:
    if block.table is None:
        block.table = torch.linspace(0, 1, WIDTH).cos()
    return block.f(x * block.table)


def routed(block: Own, x: Tensor) -> Tensor:
    picked, out = x[:, 0] > 0, torch.zeros_like(x)
    out[picked] = block.f(x[picked])
    return out


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache = nn.Linear(WIDTH, WIDTH), torch.zeros(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x.detach()])
        return 0.1 * torch.tanh(self.linear(x) @ self.cache.T) @ self.cache


def with_loss(block: Own, x: Tensor) -> Tensor:
    y = block.f(x)
    block.loss = y.square().mean()
    return y


class State(Theme):
    theme = "state of a block"

    def batchnorm_training(self) -> Found:
        """BatchNorm in training: statistics move once"""
        return self.step(several(lambda: conv(nn.BatchNorm2d(CHANNELS))), image(), net=IMAGES)

    def batchnorm_cumulative(self) -> Found:
        """BatchNorm with momentum=None (cumulative average), three steps"""
        net = self.net(several(lambda: conv(nn.BatchNorm2d(CHANNELS, momentum=None))), **IMAGES)
        for _ in range(2):
            net(image()).square().mean().backward()
        return step(net, image())

    def batchnorm_evaluation(self) -> Found:
        """BatchNorm in eval mode: running statistics are used, and must not move"""
        return step(self.net(several(lambda: conv(nn.BatchNorm2d(CHANNELS))), **IMAGES).eval(), image())

    def batchnorm_shared(self) -> Found:
        """one BatchNorm in several blocks"""
        norm = nn.BatchNorm1d(WIDTH)
        return self.step(several(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)), batch(6))

    def instancenorm_statistics(self) -> Found:
        """InstanceNorm with running statistics"""
        norm = {"affine": True, "track_running_stats": True}
        return self.step(several(lambda: conv(nn.InstanceNorm2d(CHANNELS, **norm))), image(), net=IMAGES)

    def batchnorm_second_order(self) -> Found:
        """BatchNorm under create_graph"""
        net, x = self.net(normalised()), batch(6)
        (gradient,) = torch.autograd.grad(square(net(x)), x, create_graph=True)
        gradient.square().sum().backward()
        return collect(net, penalised=gradient.detach())

    def buffer_replaced(self) -> Found:
        """an EMA buffer that forward replaces and uses"""
        return self.step(averaging(in_place=False))

    def buffer_updated(self) -> Found:
        """an EMA buffer that forward updates in place and uses"""
        return self.step(averaging(in_place=True))

    def statistics_of_functional_batchnorm(self) -> Found:
        """a block's own statistics, moved by F.batch_norm and used"""
        return self.step(several(lambda: Own(functional_norm, mean=torch.zeros(12), var=torch.ones(12))), batch(6))

    def spectral_norm(self) -> Found:
        """spectral norm in training: power iteration moves its vectors"""
        return self.step(several(spectral_normed))

    def spectral_norm_evaluation(self) -> Found:
        """spectral norm in eval mode"""
        return step(self.net(several(spectral_normed)).eval())

    def quantisation_observer(self) -> Found:
        """an observer that tracks the largest |x| and quantises by it"""
        net = self.net(several(lambda: Own(observed, largest=torch.zeros(()))))
        net(4 * batch().detach())
        return step(net)

    def attribute_counts_calls(self) -> Found:
        """a plain attribute that counts calls, and scales the output"""
        return self.step(several(lambda: Own(counting, calls=0)))

    def tensor_attribute_updated(self) -> Found:
        """a tensor that is no buffer, updated by forward"""
        return self.step(several(lambda: Own(remembering, memory=[torch.zeros(WIDTH)])))

    def list_of_the_block_appended_to(self) -> Found:
        """a block that appends to a list of its own and reads its length"""
        net = self.net(several(lambda: Own(appending, seen=[])))
        found = step(net) | step(net)
        lengths = [float(len(m.seen)) for m in net.modules() if isinstance(m, Own)]
        return found | {"lengths": torch.tensor(lengths)}

    def growing_cache(self) -> Found:
        """a cache that grows with every call, as for keys and values"""
        return self.step(several(Cached))

    def table_made_on_first_use(self) -> Found:
        """a table made on first use and kept, as for rotary embeddings"""
        return self.step(several(lambda: Own(rotary, table=None)))

    def weight_norm(self) -> Found:
        """weight normalisation (a parametrisation)"""
        return self.step(several(weight_normed))

    def lazy_layers(self) -> Found:
        """lazy layers, made on the first batch"""
        return self.step(several(lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh())))

    def auxiliary_loss(self) -> Found:
        """a loss that a block leaves on itself (mixture of experts)"""
        blocks = several(lambda: Own(with_loss))
        return self.step(blocks, loss=lambda y: square(y) + sum(b.loss for b in blocks))

    def mode_switched_between(self) -> Found:
        """net.eval() between forward and backward"""
        net = self.net(several(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Mlp(), nn.Dropout(0.3))))
        return step(net, between=net.eval)

    def mutable_configuration_changed_between(self) -> Found:
        """a setting that blocks read from a shared object, changed between forward and backward"""
        configuration = {"scale": 1.0}
        blocks = several(lambda: then(lambda x: x * configuration["scale"]))
        return self.step(blocks, between=lambda: configuration.update(scale=0.5))

    def control_flow_on_data(self) -> Found:
        """control flow that depends on the data"""
        return self.step(several(lambda: then(lambda x: x.sin() if x.detach().mean() > 0 else x * 0.5), 6))

    def shapes_from_data(self) -> Found:
        """routing: how many rows an expert sees depends on the data"""
        return self.step(several(lambda: Own(routed), 6), batch(8))

    def several_batch_sizes(self) -> Found:
        """batches of several sizes, forward passes first"""
        net = self.net(mlps())
        losses = [square(net(batch(rows))) for rows in (2, 7, 1)]
        torch.stack(losses).sum().backward()
        return collect(net)
