"""Residual networks for images [he2016; sander2021, eq. 1], plain or with momentum, with the same parameters.

    resnet(depth)        depth 18, 34, 50, 101, 152, four stages. size="imagenet": as published; size="cifar": a 3×3 stem that
                         keeps the resolution, as in the paper's experiments on CIFAR
    thin_resnet(depth)   three stages of 16, 32, 64 channels for CIFAR: basic blocks, depth 6n + 2 (20 … 110, 1202), or bottlenecks,
                         depth 9n + 2 (29 … 1199)

Parameter names are torchvision's, so its state_dicts load. Every stage is an `nn.Sequential` of blocks, and `residual` says what they
compute after the first, which strides:

    residual="relu"      relu(x + f(x)), He's block. The momentum step takes f(x) = block(x) − x, ReLU included.
    residual="branch"    x + f(x), f = bn(conv(…)): nothing follows the addition. The paper's published image networks are of this form:
                         the first block of each stage is He's, the others are the f of momentum steps, and v starts anew in each stage.

With `gamma` the blocks that keep x's shape (residual="branch": all but the first of each stage) run as a momentum network,

    v ← γ·v + (1−γ)·f(x)        x ← x + v

and the names of the parameters stay the same: a plain network's state_dict loads into its momentum form and back. With form="relu"
the steps ask He's blocks for f and form relu(x + f(x)) themselves. The
paper's depth 1201 is the 1202 of thin_resnet: its 1201 convolutions and one linear layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from . import saved
from .checks import choice, whole
from .momentum import MomentumNet
from .relu import DEEPEST, Rectified, branch_of

_STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class _Block(nn.Module):
    """relu(shortcut(x) + f(x)), shape-keeping if it has no shortcut of its own."""

    expansion: int
    relu: nn.ReLU
    downsample: nn.Module | None

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.branch(x) + shortcut)


class BasicBlock(_Block):
    """Two 3×3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu, self.downsample = nn.ReLU(inplace=True), _shortcut(channels, width, stride)

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))


class Bottleneck(_Block):
    """1×1, 3×3 (which strides), 1×1 convolutions, four times as wide outside as inside."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(channels, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), nn.BatchNorm2d(4 * width)
        self.relu, self.downsample = nn.ReLU(inplace=True), _shortcut(channels, 4 * width, stride)

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.bn3(self.conv3(self.relu(self.bn2(self.conv2(x)))))


class _Sum(_Block):
    """x + f(x), and nothing after the addition. Keeps the shape of x."""

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) + x


class BasicSum(_Sum, BasicBlock):
    """`BasicBlock` without the ReLU after the addition."""


class BottleneckSum(_Sum, Bottleneck):
    """`Bottleneck` without the ReLU after the addition."""


_SUMS: dict[type[_Block], type[_Block]] = {BasicBlock: BasicSum, Bottleneck: BottleneckSum}


class Branch(nn.Module):
    """f(x) of a block, times a factor.

    Args:
        block: keeps the shape of x; what it does after f is left out.
    """

    def __init__(self, block: _Block, factor: float = 1.0) -> None:
        super().__init__()
        self.block = block
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        f = self.block.branch(x)
        return f if self.factor == 1 else self.factor * f


class RectifiedNet(MomentumNet):
    """A momentum network of blocks that compute relu(x + f(x)), whose steps ask the blocks for f and form the sum and the relu.

    The blocks still have form "block". A block that is not, or no longer, proved to compute relu(x + f(x)), or that has hooks, runs
    as it is.

    >>> net = RectifiedNet([BasicBlock(4, 4) for _ in range(3)], gamma=0.5)
    >>> net.form, net.recurrence.form
    ('block', 'relu')
    """

    form_of_steps = "relu"

    def __init__(self, blocks: Sequence[nn.Module], gamma: Any = 0.9, **options: Any) -> None:
        super().__init__(blocks, gamma, form="block", **options)

    def _steps(self) -> tuple[Any, ...]:
        groups = super()._steps()
        recurrence = self._in_mode()
        if recurrence.form != "relu" or recurrence.residual:
            return groups
        return tuple(map(Rectified, groups))


class MomentumStage(nn.Sequential):
    """A stage whose blocks that keep their shape run as a momentum network; the parameters are named as in the plain stage.

    Args:
        blocks: the stage's blocks.
        gamma: γ.
        form: for He's blocks. "block": the blocks run whole; "relu": their branches, and the steps form relu(x + f), in fewer passes
            over memory: the same outputs to the bit, gradients up to rounding, and one bit an element and block kept; None: "relu" if
            all blocks are proved to compute that and there are not too many of them (`relu.DEEPEST`), else "block".
        factor: for blocks of residual="branch": f is multiplied by it. factor=0 with gamma=1 is γ = 1 as the paper's code has it,
            v ← 1·v + 0·f, where no f arrives and no block gets a gradient; gamma=1 alone is the Hamiltonian limit, v ← v + f.
        options: `velocity`, `memory`, `fixed_point`, `verify`, `overflow`, as in `MomentumNet`.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], gamma: Any, form: str | None = None, factor: float = 1.0, **options: Any
    ) -> None:
        super().__init__(*blocks)
        self.factor = factor
        sums: list[nn.Module] = [block for block in blocks if isinstance(block, _Sum)]
        kept = sums or [block for block in blocks if getattr(block, "downsample", None) is None]
        self.first = len(blocks) - len(kept)
        self.__dict__["momentum"] = self._network(
            kept, bool(sums), gamma, form, options
        )  # not as a submodule: the blocks are, already
        self.owner = id(self)

    def _network(
        self, kept: list[nn.Module], sums: bool, gamma: Any, form: str | None, options: dict[str, Any]
    ) -> MomentumNet | None:
        """The momentum network of the blocks that keep their shape; None if there are none."""
        if sums:
            if form is not None:
                raise ValueError(
                    f"form={form!r} is for He's blocks; those of residual='branch' have one form. Leave it out."
                )
            return MomentumNet(self._steps(kept), gamma, form="branch", **options)
        other = next((block for block in kept if branch_of(block) is None), None)
        if form is not None and choice("form", form, ("block", "relu")) == "relu" and other is not None:
            raise ValueError(
                f"{type(other).__name__} is not known to compute relu(x + f(x)), which form='relu' needs. Use form='block', or None."
            )
        if not kept:
            return None
        if form == "relu" or (form is None and other is None and len(kept) <= DEEPEST):
            return RectifiedNet(kept, gamma, **options)
        return MomentumNet(kept, gamma, form="block", **options)

    def _steps(self, kept: list[nn.Module]) -> list[nn.Module]:
        """What the momentum network runs of these blocks."""
        return [Branch(block, self.factor) if isinstance(block, _Sum) else block for block in kept]

    @property
    def momentum(self) -> MomentumNet | None:
        """The network of the blocks that keep their shape, as these are now; None if there are none."""
        net = self.__dict__["momentum"]
        if net is not None:
            if self.__dict__.get("owner") != id(
                self
            ):  # a copy that shares it (a replica, say) would run another's blocks
                rest = [module for module in net.modules() if module not in (net, net.blocks)]
                net = self.__dict__["momentum"] = copy.deepcopy(net, {id(module): module for module in rest})
                self.owner = id(self)
            kept = list(self)[self.first :]
            run = [step.block if isinstance(step, Branch) else step for step in net.blocks]
            if len(kept) != len(run) or not all(map(is_, kept, run)):
                net.blocks = nn.ModuleList(self._steps(kept))
            net.training = self.training  # train() and eval() do not reach it
        return net

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.momentum is not None:
            saved.put(destination, prefix, self.momentum.described)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if self.momentum is not None:
            self.momentum.compare(prefix, local_metadata)

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self)[: self.first]:
            x = block(x)
        net = self.momentum
        return x if net is None else net(x)


class ResNet(nn.Module):
    """A residual network for images: stem, stages, linear classifier.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        stages: how many blocks each stage has.
        width: channels inside the blocks of the first stage; each further stage has twice as many and half the resolution.
        stem: "imagenet": 7×7, stride 2, and pooling; "cifar": 3×3.
        classes: outputs.
        residual: "relu": He's blocks; "branch": the paper's (see above).
        gamma: None for the plain network, else γ of the momentum stages.
        options: of the momentum stages, see `MomentumStage`. velocity="learned" gives every stage a block more, whose f makes v₀
            [sander2021, Sec. 5.2]; the others start as without.

    >>> import torch
    >>> plain, momentum = resnet(18, size="cifar"), resnet(18, size="cifar", gamma=0.9)
    >>> momentum.load_state_dict(plain.state_dict())
    <All keys matched successfully>
    """

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], stages: Sequence[int], *, width: int = 64, stem: str = "imagenet",
        classes: int = 1000, residual: str = "relu", gamma: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        other = block if choice("residual", residual, ("relu", "branch")) == "relu" else _SUMS[block]
        if gamma is None and options:
            raise ValueError(f"{', '.join(options)} are options of momentum stages; pass gamma, too.")
        if residual == "relu" and "factor" in options:
            raise ValueError("factor is for residual='branch' alone.")
        learned = options.get("velocity") == "learned"
        options |= {"velocity": None} if learned else {}
        imagenet = choice("stem", stem, ("imagenet", "cifar")) == "imagenet"
        self.conv1 = _conv(3, width, 7, 2) if imagenet else _conv(3, width, 3)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if imagenet else nn.Identity()
        self.depth, channels = len(stages), width
        for i, count in enumerate(stages):
            inner, blocks = width * 2**i, []
            for k in range(whole("stages", count)):
                blocks.append((other if k else block)(channels, inner, 2 if i and not k else 1))
                channels = inner * block.expansion
            plain = gamma is None or (residual == "branch" and len(blocks) == 1)
            stage = nn.Sequential(*blocks) if plain else MomentumStage(blocks, gamma, **options)
            self.add_module(f"layer{i + 1}", stage)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, whole("classes", classes))
        _start(self)
        if learned:
            self._learn(block, width)

    def _learn(self, block: type[BasicBlock] | type[Bottleneck], width: int) -> None:
        """A block for the v₀ of each momentum stage."""
        for i, stage in enumerate(self.stages()):
            if isinstance(stage, MomentumStage) and stage.momentum is not None:
                inner = width * 2**i
                velocity = Branch(block(inner * block.expansion, inner))
                _start(velocity)
                self.add_module(f"velocity{i + 1}", velocity)
                stage.momentum.velocity = velocity

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i, stage in enumerate(self.stages()):
            velocity, net = getattr(self, f"velocity{i + 1}", None), getattr(stage, "momentum", None)
            if velocity is not None and net is not None and net.velocity is not velocity:
                net.velocity = velocity  # another one was put in its place, or this is a replica
            x = stage(x)
        return self.fc(self.avgpool(x).flatten(1))

    def stages(self) -> list[nn.Sequential]:
        """The stages; `stage[1:]` keep their shape, so `MomentumNet(stage[1:], gamma, form="block")` takes them."""
        return [getattr(self, f"layer{i + 1}") for i in range(self.depth)]


def resnet(depth: int, *, size: str = "imagenet", classes: int | None = None, **settings: Any) -> ResNet:
    """ResNet-18, -34, -50, -101 or -152, for images of ImageNet's or CIFAR's size. `settings`: `residual`, `gamma` and its options."""
    if depth not in _STAGES:
        raise ValueError(
            f"depth must be one of {', '.join(map(str, _STAGES))}; got {depth!r}. thin_resnet makes other depths for CIFAR."
        )
    choice("size", size, ("imagenet", "cifar"))
    block = BasicBlock if depth < 50 else Bottleneck
    return ResNet(block, _STAGES[depth], stem=size, classes=classes or (1000 if size == "imagenet" else 10), **settings)


def thin_resnet(depth: int, *, block: str | None = None, width: int = 16, classes: int = 10, **settings: Any) -> ResNet:
    """The three-stage ResNet for CIFAR with basic blocks (6n + 2) or bottlenecks (9n + 2); basic where both fit.

    `width`: channels of the first stage.

    >>> sum(p.numel() for p in thin_resnet(20).parameters())  # 0.27 M, as published, and 1×1 convolutions in the shortcuts
    272474
    """
    per = {"basic": 6, "bottleneck": 9}
    kind = block or next((name for name, n in per.items() if depth > 2 and (depth - 2) % n == 0), "basic")
    n, rest = divmod(depth - 2, per[choice("block", kind, tuple(per))])
    if rest or n < 1:
        near = sorted(
            {p * max(1, (depth - 2) // p + i) + 2 for name, p in per.items() for i in (0, 1) if block in (None, name)}
        )
        raise ValueError(
            f"depth must be 6n + 2 (basic blocks) or 9n + 2 (bottlenecks); got {depth}. Near it are {', '.join(map(str, near))}. "
            "The paper's depth 1201 is 1202 here: 1201 convolutions and a linear layer."
        )
    made = BasicBlock if kind == "basic" else Bottleneck
    return ResNet(made, (n,) * 3, width=width, stem="cifar", classes=classes, **settings)


def _start(module: nn.Module) -> None:
    for m in module.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(channels: int, width: int, stride: int) -> nn.Module | None:
    """None where x itself will do."""
    if stride == 1 and channels == width:
        return None
    return nn.Sequential(_conv(channels, width, 1, stride), nn.BatchNorm2d(width))
