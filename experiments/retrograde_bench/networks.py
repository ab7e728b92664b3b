"""The networks of the benchmark, cut into a stem, stages of like blocks, and a tail.

    x -> stem -> (head -> block, block, ...) per stage -> tail

A stage's head is a block that changes the shape of x; the others keep it, and form the stack that a method runs in its own
way. Every method wraps the same blocks, so all of them train the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from retrograde.nets.resnet import Bottleneck, ResNet, resnet, thin_resnet


class Layer(nn.Module):
    """A pre-norm transformer layer: x + a(x) + m(x + a(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(self.norm2(x))))

    def branch(self, x: Tensor) -> Tensor:
        """f(x) = a + m, without the x of the residual."""
        a = self.attention(x)
        return a + self.mlp(x + a)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Part(nn.Module):
    """One method of a block as a module, on the block's own parameters."""

    def __init__(self, block: nn.Module, name: str) -> None:
        super().__init__()
        self.block, self.name = block, name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.block, self.name)(x)


class Stage(nn.Module):
    """Blocks that keep the shape of x, and the head before them.

    Args:
        blocks: each computes x + f(x), or relu(x + f(x)).
        head: what changes the shape, if anything does.
        size: elements of x for one example.
    """

    def __init__(self, blocks: Sequence[nn.Module], head: nn.Module | None, size: int) -> None:
        super().__init__()
        self.blocks, self.head, self.size = nn.ModuleList(blocks), head, size

    def branches(self) -> list[nn.Module]:
        """f(x) alone, block by block: what a two-stream coupling adds. A ResNet's drop their last ReLU."""
        return [Part(block, "branch") for block in self.blocks]

    def halves(self) -> list[nn.Module]:
        """The steps of a two-stream coupling: attention and MLP of each layer, or the branches of a ResNet."""
        if not isinstance(self.blocks[0], Layer):
            return self.branches()
        return [Part(block, name) for block in self.blocks for name in ("attention", "mlp")]


class Network(nn.Module):
    def __init__(self, stem: nn.Module, stages: Sequence[Stage], tail: nn.Module) -> None:
        super().__init__()
        self.stem, self.stages, self.tail = stem, nn.ModuleList(stages), tail

    @property
    def activations(self) -> int:
        """Elements of x summed over the blocks of all stages, for one example."""
        return sum(stage.size * len(stage.blocks) for stage in self.stages if isinstance(stage, Stage))

    def cast_bytes(self) -> int:
        """Bytes of the weights as bfloat16 that autocast casts: those of matrix products and convolutions."""
        layers = [m for m in self.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        return sum(2 * p.numel() for layer in layers for p in layer.parameters(recurse=False))


def assembled(
    network: Network, stack: Callable[[Stage], nn.Module], head: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """The network with every stage's blocks run by what `stack` makes of them, and heads by what `head` does."""
    parts: list[nn.Module] = [network.stem]
    for stage in network.stages:
        assert isinstance(stage, Stage)
        parts += [] if stage.head is None else [head(stage.head)]
        parts.append(stack(stage))
    return nn.Sequential(*parts, network.tail)


def transformer(depth: int, width: int, heads: int, tokens: int) -> Network:
    layers = [Layer(width, heads) for _ in range(depth)]
    return Network(nn.Identity(), [Stage(layers, None, tokens * width)], nn.Identity())


class Added(nn.Module):
    """x + f(x) of a branch that knows nothing of it."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def branch(self, x: Tensor) -> Tensor:
        return self.f(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def mlp(depth: int, width: int) -> Network:
    """f(x) = W2ᵀ tanh(W1 x + b) [sander2021, Sec. 3.2]."""
    branches = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False)) for _ in range(depth)
    ]
    return Network(nn.Identity(), [Stage([Added(f) for f in branches], None, width)], nn.Identity())


def convolutions(depth: int, width: int, side: int) -> Network:
    """f = conv-bn-relu-conv-bn."""

    def half() -> list[nn.Module]:
        return [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]

    branches = [nn.Sequential(*half(), nn.ReLU(), *half()) for _ in range(depth)]
    return Network(nn.Identity(), [Stage([Added(f) for f in branches], None, width * side**2)], nn.Identity())


def resnet152() -> Network:
    return _cut(resnet(152), 56)


def tiny_resnet() -> Network:
    """Bottlenecks in four stages, for images of 32²."""
    return _cut(ResNet(Bottleneck, (2, 3, 4, 3), width=8), 8)


def cifar_resnet(depth: int, image: int = 32) -> Network:
    return _cut(thin_resnet(depth), image)


def _cut(net: ResNet, side: int) -> Network:
    """side: of the first stage's output, in pixels."""
    stages = []
    for i, blocks in enumerate(net.stages()):
        changes = getattr(blocks[0], "downsample", None) is not None
        last = [m for m in blocks[-1].modules() if isinstance(m, nn.Conv2d)][-1]
        size = last.out_channels * (side >> i) ** 2
        stages.append(Stage(list(blocks)[int(changes) :], blocks[0] if changes else None, size))
    stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
    return Network(stem, stages, nn.Sequential(net.avgpool, nn.Flatten(), net.fc))
