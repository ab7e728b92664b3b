"""Ways of remembering: the memory modes of a network, and passes with a plan of our choice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from problems import KINDS as BASIC
from retrograde.nets.coupling import CouplingNet
from retrograde.reverse.coupling import Coupling
from retrograde.reverse.extra import Extra
from retrograde.reverse.forward import Pass
from retrograde.reverse.momentum import Momentum
from retrograde.reverse.range import PassRange
from retrograde.reverse.residual import PlainPass
from retrograde.reverse.sign import Signed

SCHEMES = ("branch", "block", "relu", "coupling", "residual")
"""The three forms of the momentum scheme, the coupling, and the plain residual network."""
DEPTH = 7
Plan = str | tuple[int, int]
"""A memory mode; or how many of the blocks are reversed, and how many of the next keep their input."""
PLANS: tuple[Plan, ...] = ("reverse", "checkpoint", (DEPTH - 3, 2), (2, DEPTH - 2), (DEPTH - 1, 0))
KEPT: tuple[Plan, ...] = ("checkpoint", (0, DEPTH - 2))
"""Those that a residual network has, too."""


class Event:
    """Of an accelerator that is done: a `Deferred` with such events waits for values as on one."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Lstm(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def instance() -> nn.Module:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm, nn.Hardswish(), nn.Dropout(0.2), nn.Conv2d(4, 4, 1))


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **BASIC,
    "lstm": (Lstm, (2, 5, 8)),
    "instance norm": (instance, (2, 4, 5, 5)),
}


class Whole(nn.Module):
    """relu(x + f(x)), as ResNets write it."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.relu(self.f(x, *args, **kwargs).clone().add_(x))


def network(scheme: str, blocks: Sequence[nn.Module], **options: Any) -> Any:
    """These blocks in a scheme, with everything stored."""
    options = {"memory": "store", **options}
    if scheme == "coupling":
        return CouplingNet(blocks, **options)
    if scheme == "residual":
        return rg.MomentumNet(blocks, **{"form": "relu", **options, "gamma": 0})
    return rg.MomentumNet(blocks, form=scheme, **options)


def given(scheme: str, x: Tensor) -> Tensor:
    """An input of which the blocks of this scheme get something like x: one half, in a coupling."""
    return torch.cat([x, x.flip(0) * 0.5], 1) if scheme == "coupling" else x


def begun(net: Any, x: Tensor) -> PassRange:
    """The range with which a pass on x begins."""
    guard = 0 if isinstance(net, CouplingNet) else net.recurrence.most_guard
    return net.range.begin(x, len(net.blocks) + 1, training=net.training, overflow=net.overflow, most_guard=guard)


class Mixed(nn.Module):
    """The blocks of a network, run by a pass with a plan of our choice."""

    def __init__(self, net: Any, reversed: int, kept: int) -> None:
        super().__init__()
        self.net = net
        self.plan = {"reversed": reversed, "kept": kept}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        net, depth, extra = self.net, len(self.net.blocks), Extra(args, kwargs)
        settings = {"verify": net.verify, "memo": net.memo, "deferred": net.range.deferred, **self.plan}
        if isinstance(net, CouplingNet):
            run = Pass(Coupling(x, net.recurrence, begun(net, x)), x, depth, **settings)
        elif (net.recurrence if net.training else net.recurrence.in_evaluation).residual:
            settings |= {"reversed": 0, "kept": sum(self.plan.values())}
            run: Pass = PlainPass(x, net.form, depth, **settings)
        else:
            kind = Signed if net.recurrence.signed else Momentum
            run = Pass(kind(x, net.recurrence, begun(net, x), reversible=False), x, depth, **settings)
            if net.velocity == "first":
                run.launch(net.blocks[0], extra)
            elif net.velocity is not None:
                run.launch(net.velocity, Extra((), {}), "branch")
        for block in net.blocks:
            run.step(block, extra)
        if not isinstance(run, PlainPass):
            net.range.learn(run.state.range)
        return run.rest() if isinstance(net, CouplingNet) else run.finish()


def remembered(net: Any, plan: Plan, **settings: Any) -> nn.Module:
    """A copy of the network that remembers in this way."""
    net = copy.deepcopy(net)
    for name, value in settings.items():
        setattr(net, name, value)
    if isinstance(plan, str):
        net.memory = plan
        return net
    return Mixed(net, *plan)


def inner(model: nn.Module) -> Any:
    """The network itself."""
    return model.net if isinstance(model, Mixed) else model


def left_by(model: nn.Module) -> list[Tensor | None]:
    """What a step leaves: gradients, buffers, and the place of the random generator."""
    return [*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers()), torch.rand(1)]


def assert_equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], what: object = "") -> None:
    """Bit by bit; NaN never."""
    assert len(found) == len(wanted)
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None:
            assert a is b, f"{what}: tensor {k} is there in one of the two only"
        else:
            assert a.dtype == b.dtype, f"{what}: tensor {k}"
            assert torch.equal(a, b), f"{what}: tensor {k} of {len(found)}, of shape {tuple(a.shape)}, differs"
