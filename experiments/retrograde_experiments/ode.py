"""Fig. 9: accuracy on CIFAR-10 with ODE blocks of first order, of second order, and without any, over the number of channels.

    images → c channels at a quarter of the resolution → 10 blocks → classifier
    first     ẋ = f(x)                  second     ε ẍ + ẋ = f(x), v₀ = 0                  none     no blocks
    f = norm-relu-conv-norm-relu-conv-norm, as in the code that the paper adapted, where every convolution sees the time as a channel
    more, and the solver is torchdiffeq's default at tolerance 1e-3

The repeats of one number of channels are trained side by side in one network whose convolutions are grouped by repeat: they share no
parameter, see batches of their own, and take one network's time (an adaptive solver takes steps that suit them all). Networks of both
orders start from the same weights and see the same batches, so that they are compared in pairs. ε and v₀ are ours: the paper does not
give them. The velocity goes on from block to block, as in the Momentum ResNet that this is the limit of.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import mean
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from retrograde.nets.ode import EXPLICIT, NeuralODE, SecondOrderODE

from .config import Settings
from .data.batches import Resident, Several
from .errors import ExperimentError
from .findings import Difference, Finding, compared, spread
from .metrics import Key, Record
from .run import Context
from .style import COLOURS, MARKERS, canvas
from .train.graphed import Graphed
from .train.learner import fast
from .train.schedule import rate_at
from .train.setting import Recipe
from .train.unit import small_set

ORDERS = {"none": "no ODE blocks", "first": "first order", "second": "second order"}


@dataclass(frozen=True)
class Config(Settings):
    decisive: ClassVar[tuple[str, ...]] = (
        "data", "blocks", "time", "solver", "tolerance", "epochs", "batch", "rate", "schedule", "milestones", "limit",
    )  # fmt: skip

    data: str = "cifar10"
    channels: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    blocks: int = 10
    groups: int = 32  # of GroupNorm, at most: 32 normalises every channel by itself here, 1 all together
    eps: float = 1.0
    velocity: str = "zero"  # v₀: "first" for f(x₀), "zero"
    carried: bool = True  # from block to block; else each starts with v₀
    time: bool = True  # a channel more in every convolution of f
    solver: str = "dopri5"
    steps: int = 0  # of a solver of fixed step, in a block; 0: the solver finds its own, at `tolerance`
    tolerance: float = 1e-3
    gradient: str = "direct"
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
    def default(cls) -> Config:
        return cls(channels=(1, 2, 4), solver="midpoint", steps=1, epochs=10, milestones=(5,), repeats=5)

    @classmethod
    def smoke(cls) -> Config:
        return cls(
            data="digits", channels=(2,), blocks=2, solver="euler", steps=1, epochs=2, batch=64, schedule="onecycle", limit=128,
            repeats=3,
        )  # fmt: skip

    def setting(self) -> str:
        part = f" (its first {self.limit:,} training images)" if self.limit else ""
        accuracy = f"{self.steps} step(s) each" if self.steps else f"tolerance {self.tolerance:g}"
        return (
            f"{self.data}{part}, {self.blocks} blocks of horizon 1 ({self.solver}, {accuracy}, {self.gradient} gradient"
            f"{', f compiled' if self.compile else ''}), {'a' if self.time else 'no'} time channel, "
            f"ε = {self.eps:g}, v₀ = {'f(x₀)' if self.velocity == 'first' else '0'}{' in the first' if self.carried else ''}, "
            f"{self.epochs} epochs of batch {self.batch}, SGD 0.9, rate {self.rate:g} ({self._rates()}), {self.repeats} seeds. "
            "The paper: 120 epochs, rate 0.1, ÷10 at 60; a time channel, tolerance 1e-3."
        )

    def _rates(self) -> str:
        at = ", ".join(map(str, self.milestones))
        rises = f", rising for {self.warmup:g} epoch(s)" if self.warmup else ""
        return (f"÷10 at {at}" if self.schedule == "multistep" else self.schedule) + rises


def units(config: Config) -> list[Key]:
    return [{"channels": c, "order": order} for c in config.channels for order in ORDERS]


class F(nn.Sequential):
    """f of a block, for `repeats` networks side by side: a time is given to every convolution as a channel more of each network."""

    repeats, timed = 1, False

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        for layer in self:
            x = layer(self._with_time(x, t) if self.timed and isinstance(layer, nn.Conv2d) else x)
        return x

    def _with_time(self, x: Tensor, t: Tensor | None) -> Tensor:
        """x with the time, 0 unless given, as a channel more of each network."""
        parts = x.unflatten(1, (self.repeats, -1))
        channel = torch.zeros_like(parts[:, :, :1]) if t is None else t.to(x.dtype).expand_as(parts[:, :, :1])
        return torch.cat([parts, channel], 2).flatten(1, 2)


class FirstOrder(NeuralODE):
    """ẋ = f(x, t)."""

    def derivative(self, t: Tensor, state: Tensor) -> Tensor:
        return self.f(state, t)


class SecondOrder(SecondOrderODE):
    """ε ẍ + ẋ = f(x, t)."""

    def derivative(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, v = state
        return v, (self.f(x, t) - v) / self.eps


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
            seen = c + config.time
            found = F(norm(), nn.ReLU(), conv(seen, 3), norm(), nn.ReLU(), conv(seen, 3), norm())
            found.repeats, found.timed = r, config.time
            if config.compile:
                found.compile(dynamic=False)
            return found

        def block() -> nn.Module:
            accuracy = {"steps": config.steps} if config.steps else {"rtol": config.tolerance, "atol": config.tolerance}
            options: dict[str, Any] = {"solver": config.solver, "gradient": config.gradient, **accuracy}
            first, second = (FirstOrder, SecondOrder) if config.time else (NeuralODE, SecondOrderODE)
            if order == "first":
                return first(f(), **options)
            return second(f(), config.eps, velocity="first" if config.velocity == "first" else None, **options)

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

    explicit = config.gradient == "direct" and config.solver in EXPLICIT and config.steps > 0
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


def _channels(count: int) -> str:
    return f"{count} channel{'s' * (count != 1)}"


def figure(config: Config, records: list[Record]) -> Any:
    """Left: accuracies, every seed and the mean; right: second order less first, pair by pair, with the interval of 95 % confidence."""
    picture, (left, right) = canvas(9.4, 4, 1, 2, width_ratios=(1.5, 1))
    places = {c: k for k, c in enumerate(config.channels)}
    for shift, (order, name) in zip((-0.22, 0.0, 0.22), ORDERS.items(), strict=True):
        found = {places[c]: values for c in config.channels if (values := _at(records, c, order))}
        for place, values in found.items():
            beside = [place + shift + 0.09 * (k / max(1, len(values) - 1) - 0.5) for k in range(len(values))]
            left.plot(beside, values, ".", color=COLOURS[order], markersize=4, alpha=0.55)
        left.plot(
            [p + shift for p in found],
            [mean(v) for v in found.values()],
            MARKERS[order] + "-",
            color=COLOURS[order],
            label=name,
        )
    for c, place in places.items():
        pair = [_at(records, c, order) for order in ("second", "first")]
        if all(pair):
            d = Difference.of(*pair)
            right.plot(
                [place] * d.pairs, [a - b for a, b in zip(*pair, strict=True)], ".", color=COLOURS["second"], alpha=0.45
            )
            reach = [[d.mean - d.low], [d.high - d.mean]] if d.pairs > 1 else None
            right.errorbar(place, d.mean, reach, fmt=MARKERS["second"], color="#111827", capsize=4)
    right.axhline(0, color="#9ca3af", lw=1)
    for axis in (left, right):
        axis.set_xticks(range(len(places)), [str(c) for c in places])
        axis.set(xlabel="channels", xlim=(-0.6, len(places) - 0.4))
        axis.grid(axis="y", alpha=0.25)
    left.set(ylabel="test accuracy, %", title=f"{config.blocks} ODE blocks, {config.data}")
    right.set(ylabel="accuracy, %", title="second order less first, in pairs")
    left.legend(loc="lower right")
    return picture


def findings(config: Config, records: list[Record]) -> list[Finding]:
    found = []
    for place, c in enumerate(sorted(config.channels)):
        accuracy = {order: _at(records, c, order) for order in ORDERS if _at(records, c, order)}
        found += [
            Finding(f"accuracy, {_channels(c)}, {ORDERS[o]}", spread(v, ".2f", " %")) for o, v in accuracy.items()
        ]
        if {"first", "second"} <= accuracy.keys():
            least = 0.0 if place < 2 else -inf  # asked of the smallest
            found.append(
                compared(f"second order less first, {_channels(c)}", accuracy["second"], accuracy["first"], least=least)
            )
            took = {r["order"]: r.run.get("seconds", 0) / config.epochs for r in records if r["channels"] == c}
            found.append(
                Finding(
                    f"seconds per epoch as run, {_channels(c)}, first | second",
                    f"{took['first']:.1f} | {took['second']:.1f}",
                )
            )
    return found
