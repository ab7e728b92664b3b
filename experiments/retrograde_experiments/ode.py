"""Fig. 9: accuracy on CIFAR-10 with ODE blocks of first order, of second order, and without any, over the number of channels.

    images → c channels at a quarter of the resolution → 10 blocks → classifier
    first     ẋ = f(x)                  second     ε ẍ + ẋ = f(x), v₀ = 0                  none     no blocks
    f = norm-relu-conv-norm-relu-conv-norm, as in the code that the paper adapted

The repeats of one number of channels are trained side by side in one network whose convolutions are grouped by repeat: they share no
parameter, see batches of their own, and take one network's time. ε, v₀, solver and steps are ours: the paper does not give them. The
velocity goes on from block to block, as in the Momentum ResNet that this is the limit of.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from retrograde.nets.ode import EXPLICIT, NeuralODE, SecondOrderODE

from .data.batches import Resident, Several
from .errors import ExperimentError
from .findings import Finding, spread
from .metrics import Key, Record
from .run import Context
from .style import canvas
from .train.graphed import Graphed
from .train.learner import fast
from .train.schedule import rate_at
from .train.setting import Recipe
from .train.unit import small_set

ORDERS = {"none": "no ODE blocks", "first": "first order", "second": "second order"}
TINTS = {"none": "#9ca3af", "first": "#2563eb", "second": "#ea580c"}
SHIFTS = {"none": 1.0, "first": 0.95, "second": 1.05}  # of a seed's point


@dataclass(frozen=True)
class Config:
    data: str = "cifar10"
    channels: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    blocks: int = 10
    groups: int = 32  # of GroupNorm, at most: 32 normalises every channel by itself here, 1 all together
    eps: float = 1.0
    velocity: str = "zero"  # v₀: "first" for f(x₀), "zero"
    carried: bool = True  # from block to block; else each starts with v₀
    solver: str = "rk4"
    steps: int = 2
    gradient: str = "adjoint"
    compile: bool = False  # f, by torch.compile: fewer and larger kernels
    epochs: int = 120
    batch: int = 128
    rate: float = 0.1
    schedule: str = "multistep"
    milestones: tuple[int, ...] = (60,)
    warmup: float = 0.0  # epochs in which the rate rises
    limit: int | None = None
    repeats: int = 3

    @classmethod
    def paper(cls) -> Config:
        return cls()

    @classmethod
    def default(cls) -> Config:
        return cls(
            channels=(1, 2, 4),
            solver="midpoint",
            steps=1,
            gradient="direct",
            epochs=10,
            milestones=(5,),
            repeats=5,
        )

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", channels=(2,), blocks=2, solver="euler", steps=1, epochs=2, batch=64, schedule="onecycle", limit=128,
            repeats=2,
        )  # fmt: skip

    def setting(self) -> str:
        smaller = "" if self == Config.paper() else " The paper: 120 epochs, rate 0.1, ÷10 at 60."
        part = f" (its first {self.limit:,} training images)" if self.limit else ""
        return (
            f"{self.data}{part}, {self.blocks} blocks of horizon 1 ({self.solver}, "
            f"{self.steps} step(s) each, {self.gradient} gradient{', f compiled' if self.compile else ''}), "
            f"ε = {self.eps:g}, v₀ = {'f(x₀)' if self.velocity == 'first' else '0'}{' in the first' if self.carried else ''}, "
            f"{self.epochs} epochs of batch {self.batch}, SGD 0.9, rate {self.rate:g} ({self._rates()}), {self.repeats} seeds.{smaller}"
        )

    def _rates(self) -> str:
        at = ", ".join(map(str, self.milestones))
        rises = f", rising for {self.warmup:g} epoch(s)" if self.warmup else ""
        return (f"÷10 at {at}" if self.schedule == "multistep" else self.schedule) + rises


def units(config: Config) -> list[Key]:
    return [{"channels": c, "order": order} for c in config.channels for order in ORDERS]


class F(nn.Sequential):
    """f of a block. The compiler looks into classes of ours, not into PyTorch's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Side(nn.Module):
    """Several networks side by side: repeat r has channels r·c … (r + 1)·c − 1 of every layer.

    Shape:
        x: (batch, repeats · image channels, height, width), an image for each repeat. Output: (repeats, batch, classes).
    """

    def __init__(self, config: Config, order: str, channels: int, colours: int, classes: int) -> None:
        super().__init__()
        self.repeats, r, c = config.repeats, config.repeats, channels

        def norm() -> nn.GroupNorm:
            return nn.GroupNorm(r * min(config.groups, c), r * c)

        def conv(before: int, kernel: int, stride: int = 1) -> nn.Conv2d:
            return nn.Conv2d(r * before, r * c, kernel, stride, padding=1, groups=r)

        def f() -> nn.Module:
            found = F(norm(), nn.ReLU(), conv(c, 3), norm(), nn.ReLU(), conv(c, 3), norm())
            if config.compile:
                found.compile(dynamic=False)
            return found

        def block() -> nn.Module:
            options: dict[str, Any] = {"solver": config.solver, "steps": config.steps, "gradient": config.gradient}
            if order == "first":
                return NeuralODE(f(), **options)
            velocity = "first" if config.velocity == "first" else None
            return SecondOrderODE(f(), config.eps, velocity=velocity, **options)

        self.stem = nn.Sequential(conv(colours, 3), norm(), nn.ReLU(), conv(c, 4, 2), norm(), nn.ReLU(), conv(c, 4, 2))
        self.blocks = nn.Sequential(*([] if order == "none" else [block() for _ in range(config.blocks)]))
        self.carried = order == "second" and config.carried
        self.head = nn.Sequential(norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classify = nn.Conv1d(r * c, r * classes, 1, groups=r)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.classify(self.head(self._flow(self.stem(x))).flatten(2))
        return scores.unflatten(1, (self.repeats, -1)).squeeze(-1).transpose(0, 1)

    def _flow(self, x: Tensor) -> Tensor:
        if not self.carried:
            return self.blocks(x)
        v, blocks = None, cast("list[SecondOrderODE]", list(self.blocks))
        for block in blocks:
            x, v = block.encode(x, v)
        return x


def measure(config: Config, unit: Key, context: Context) -> dict[str, Any]:
    """The accuracy of every repeat, and the mean training loss per epoch."""
    images, device = small_set(config.data), context.device
    source = Resident(images, config.batch, device=device, limit=config.limit)
    batches = Several(source, range(config.repeats))
    steps, recipe = source.steps, Recipe(
        epochs=config.epochs, batch=config.batch, rate=config.rate, schedule=config.schedule, milestones=config.milestones,
        warmup=config.warmup,
    )  # fmt: skip
    torch.manual_seed(unit["channels"])
    net = Side(config, unit["order"], unit["channels"], source.channels, source.classes).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=config.rate, momentum=0.9)
    done, curve = 0, []
    saved = context.checkpoint.load()
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        done, curve = saved["done"], saved["curve"]
    context.progress.steps(config.epochs * steps, done)

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = config.repeats * cross_entropy(net(x).flatten(0, 1), y.flatten())  # their sum
        loss.backward()
        return loss.detach()

    explicit = config.gradient == "direct" and config.solver in EXPLICIT
    graphed = Graphed(list(net.parameters()), graph=device.type == "cuda" and explicit)
    with fast(device):
        for epoch in range(done // steps, config.epochs):
            total = torch.zeros((), device=device)
            for x, y in batches.epoch(epoch):
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(recipe, done, steps)
                total, done = total + graphed(both, x, y) / config.repeats, done + 1
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                context.progress.step()
            curve.append(total.item() / steps)
            if curve[-1] != curve[-1]:
                raise ExperimentError(f"the loss is not a number after epoch {epoch + 1}: lower the rate.")
            if context.checkpoint.due():
                kept = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "done": done, "curve": curve}
                context.checkpoint.save(kept)
    return {"accuracy": accuracies(net, source), "train_loss": curve}


@torch.no_grad()
def accuracies(net: Side, source: Resident) -> list[float]:
    """Of each repeat, in %, on the test images."""
    right, count = torch.zeros(net.repeats), 0
    for x, y in source.test():
        right += (net(x.contiguous().repeat(1, net.repeats, 1, 1)).argmax(-1) == y).sum(1).cpu()
        count += len(y)
    return (100 * right / count).tolist()


def _at(records: list[Record], channels: int, order: str) -> list[float]:
    return next((r["accuracy"] for r in records if (r["channels"], r["order"]) == (channels, order)), [])


def figure(config: Config, records: list[Record]) -> Any:
    picture, axis = canvas(5.6, 3.8)
    for order, name in ORDERS.items():
        found = {c: _at(records, c, order) for c in config.channels if _at(records, c, order)}
        axis.plot(list(found), [mean(v) for v in found.values()], "o-", color=TINTS[order], label=name)
        for c, values in found.items():
            beside = c * SHIFTS[order]  # or the points of one order would hide those of another
            axis.plot([beside] * len(values), values, ".", color=TINTS[order], markersize=4, alpha=0.6)
    axis.set_xscale("log", base=2)
    axis.set_xticks(config.channels, [str(c) for c in config.channels])
    axis.set(xlabel="channels", ylabel="test accuracy, %", title=f"{config.blocks} ODE blocks, {config.data}")
    axis.legend()
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for place, c in enumerate(sorted(config.channels)):
        accuracy = {order: _at(records, c, order) for order in ORDERS if _at(records, c, order)}
        found += [Finding(f"accuracy, {c} channels, {ORDERS[o]}", spread(v, ".2f", " %")) for o, v in accuracy.items()]
        if {"first", "second"} <= accuracy.keys():
            ahead = mean(accuracy["second"]) - mean(accuracy["first"])
            asked = place < 2  # the smallest
            found.append(
                Finding(
                    f"second order less first, {c} channels",
                    f"{ahead:+.2f} %",
                    "> 0" if asked else "",
                    ahead > 0 if asked else None,
                )
            )
    return found
