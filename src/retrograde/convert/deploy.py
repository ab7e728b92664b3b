"""`deploy`: a converted model as ordinary modules in floats, for export, other runtimes, compilers, and serving.

    for layer in self.layers:
        x = layer(x, mask)              # y = the layer's own output;  v ← γ·v + (1−γ)·(y − x);  x ← x + v

The model's own loop runs the blocks, so v has to get from one block to the next. It travels with x, as an attribute of the tensor that
the block returns. So it needs no place in the model: several threads may run one model, a pass that ends early leaves nothing behind,
and what a tracer sees are three operations a block. Where the model adds f(x) to x itself (form "branch"), the next x is a tensor that
no block has seen; there v waits in the stage, by thread, for the block after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..nets import floats
from ..nets.coupling import CouplingNet
from ..nets.momentum import MomentumNet
from ..reverse.changes import version
from ..reverse.range import holders
from . import block as blocks
from .schedule import unschedule
from .split import parts_now
from .stage import Stage

HANDED = "_retrograde_handed"
"""Where an x has the v that belongs to it."""


@dataclass(eq=False)
class Handed:
    """What one block hands to the next."""

    stage: Stage
    v: Tensor
    k: int  # the next step
    index: int  # the next block
    version: int | None  # of x, where it is known


class Deployed(blocks.Step):
    """What a deployed block's class adds to its own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        place: blocks.Place = self._retrograde_place
        own: Any = self._retrograde_class.forward
        if not args and place.keyword not in kwargs:
            return own(self, **kwargs)  # which says what is missing
        x: Tensor = args[0] if args else kwargs[place.keyword]
        if place.steps > 1:
            kwargs.pop("" if args else place.keyword, None)
            return parts_now(self, self._retrograde_class, place.steps, place.path).walk(
                lambda k, part, x, given, more: run_step(place, k, x, lambda x: part.run(self, x, *given, **more)),
                self, x, args[1:], kwargs,
            )  # fmt: skip

        def run(given: Tensor) -> Any:
            return own(self, given, *args[1:], **kwargs) if args else own(self, **{**kwargs, place.keyword: given})

        return run_step(place, 0, x, run)

    _retrograde_does = "momentum in floats"


class DeployedMomentum(blocks.Derived):
    """What a deployed `MomentumNet`'s class adds to its own."""

    forward = floats.momentum


class DeployedCoupling(blocks.Derived):
    """What a deployed `CouplingNet`'s class adds to its own."""

    forward = floats.coupling


def run_step(place: blocks.Place, part: int, x: Tensor, run: Callable[[Tensor], Any]) -> Any:
    """A step in floats: what the block, or this part of it, returns, with the next x in it."""
    stage = place.stage
    index = place.index + part
    adds = stage.settings.form == "branch"  # the model does
    v, k = taken(place, index, x)
    out = run(x) if adds else place.givers[part](run, x)
    several = isinstance(out, tuple | list) and len(out) > 0 and isinstance(out[0], Tensor)
    f = floats.branch(x, out[0] if several else out, "branch" if adds else "block")
    if not k and stage.settings.velocity == "first":
        v = f
    _, _, gamma, gain = stage.recurrence.factors[k]
    v = floats.velocity(f, v, gamma, gain)
    x1 = v if adds else floats.moved(x, v)
    if k + 1 < stage.steps and not index + 1 == stage.blocks == stage.steps:
        hand_on(place, index, x1, v, k + 1)
    if not several:
        return x1
    kind = type(out)
    return kind((x1, *out[1:])) if kind in (tuple, list) else kind(x1, *out[1:])


def taken(place: blocks.Place, index: int, x: Tensor) -> tuple[Tensor | None, int]:
    """v for a block that is given x, and the step that it takes; None, 0 where a pass begins."""
    blind = torch.compiler.is_compiling()
    handed = _handed(place, index, x, blind)
    again = handed is None and index and not blind and torch._C._current_graph_task_id() != -1
    if again or (handed is not None and torch.is_grad_enabled() and x.requires_grad and not handed.v.requires_grad):
        raise RuntimeError(
            f"{place.path} is given an x with a gradient and no velocity with one: the blocks before ran without gradients, as under "
            "checkpointing with use_reentrant=True. Turn that off; or train the converted model, and deploy it afterwards."
        )
    if handed is not None:
        place.stage.joined = True
        return handed.v, handed.k
    if index and not blind:
        place.stage.restart(x, index, place.path)
    place.stage.open.latest = index
    return None, 0


def _handed(place: blocks.Place, index: int, x: Tensor, blind: bool) -> Handed | None:
    """What the block before this one handed on, if x is the x that it belongs to. `blind`: versions cannot be asked for."""
    handed: Handed | None
    if place.stage.settings.form == "branch":
        handed = place.stage.waiting.by.pop(_thread(), None)
        return handed if handed is not None and handed.index == index else None
    handed = getattr(x, HANDED, None)
    if handed is None or handed.stage is not place.stage:
        return None
    if not (blind or torch.is_grad_enabled()):
        delattr(x, HANDED)  # what keeps x need not keep v
    known = blind or handed.version is None or handed.version == version(x)
    return handed if known else None


def hand_on(place: blocks.Place, index: int, x: Tensor, v: Tensor, k: int) -> None:
    """Leave v for the next block."""
    at = None if torch.compiler.is_compiling() else version(x)
    handed = Handed(place.stage, v, k, index + 1, at)
    if place.stage.settings.form == "branch":
        place.stage.waiting.by[_thread()] = handed
    else:
        setattr(x, HANDED, handed)


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def deploy(model: nn.Module) -> nn.Module:
    """Run the momentum stages of a model in floats, by ordinary operations: for `torch.export`, ONNX, `torch.compile` and
    `torch.jit.trace`, and for inference at nearly the speed of the plain network.

    The model is changed in place, as by `convert`: the same object, modules, parameters and `state_dict`, without integers and without
    hooks. Its outputs are those of the converted model up to the rounding of floats. Stages with γ = 0 become the plain model itself.
    `MomentumNet`s and `CouplingNet`s in the model are deployed with it. To go on training the converted model, deploy a copy:
    `rg.deploy(copy.deepcopy(model))`. `revert` undoes it.

    Args:
        model: a converted model, a `MomentumNet`, a `CouplingNet`, or anything that has them in it.

    Returns:
        The model.

    Raises:
        ValueError: nothing to deploy; blocks of form "branch" that are run more than once, or with x changed between them. The model is
            left as it was.

    >>> from retrograde.convert import convert
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 6).eval()
    >>> x = torch.randn(2, 5, 16)
    >>> y = convert(model, gamma=1 / 8)(x)
    >>> program = torch.export.export(deploy(model), (x,))
    >>> torch.allclose(program.module()(x), y, atol=1e-5)
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}.")
    placed = [(module, place) for module in model.modules() if (place := blocks.place_of(module)) is not None]
    nets = [part for _, part in holders(model) if isinstance(part, MomentumNet | CouplingNet)]
    if not placed and not nets:
        raise ValueError(
            f"there is nothing to deploy in this {type(model).__name__}: it is not converted, and has no MomentumNet or CouplingNet in "
            "it. rg.convert(model, gamma=…) first, with the gamma of its training."
        )
    for module, place in placed:
        blocks.check_class(module, place.path)
        _check(place.stage)
    for module, place in placed:
        if isinstance(module, Deployed):
            continue
        stage = place.stage
        blocks.remove(module)
        if stage.checkpointed or stage.recurrence.in_evaluation.residual:
            continue  # the plain block
        module.__dict__[blocks.PLACE] = place
        place.givers = tuple(floats.Giver() for _ in range(place.steps))
        module.__class__ = blocks.derived_class(Deployed, type(module))
    for net in nets:
        if not isinstance(net, blocks.Derived):
            net.__dict__[floats.GIVERS] = [floats.Giver() for _ in net.blocks]
            adds: Any = DeployedMomentum if isinstance(net, MomentumNet) else DeployedCoupling
            net.__class__ = blocks.derived_class(adds, type(net))  # type: ignore[assignment]
    unschedule(model)
    return model


def undeploy(model: nn.Module) -> bool:
    """Make deployed networks what they were; whether there were any. Blocks are reverted as converted ones are."""
    found = False
    for _, net in holders(model):
        if net.__dict__.pop(floats.GIVERS, None) is not None:
            found = True
            net.__class__ = vars(type(net))["_retrograde_class"]
    return found


def _check(stage: Stage) -> None:
    """Raise for a stage in which it could not be seen where a pass begins, or ends."""
    if stage.settings.form != "branch" or stage.recurrence.in_evaluation.residual:
        return
    if stage.blocks != stage.steps:
        raise ValueError(
            f"stage {stage.name!r} runs {stage.blocks} blocks in {stage.steps} steps, and the model adds what they return: in floats "
            "it is not seen where a pass begins. Make that loop a MomentumNet of the repeated blocks, or let them return x + f(x)."
        )
    if "restart" in stage.warned:
        raise ValueError(
            f"the velocity of stage {stage.name!r} starts from 0 again in its middle, as a warning said, and the model adds what the "
            "blocks return: in floats that is not seen. Name shorter stages, or let the blocks return x + f(x)."
        )
