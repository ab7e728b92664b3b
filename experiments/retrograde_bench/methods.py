"""How a stage of blocks is run, and what is remembered: twelve baselines by name, and ours by description.

Whatever the method, blocks outside of the stacks (a ResNet stage's first, which changes the shape) are checkpointed, except
where everything is stored ("plain", "ours[memory=store]") or where a package has its own way with them ("momentumnet").
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import retrograde as rg
from retrograde_experiments.private import momentum_options

from .cases import Case
from .compiling import Compiled, compiled, run
from .networks import Network, Stage, assembled
from .notation import MODES, Ours, described, parsed

BASELINE = "checkpoint"
ACTIVATION_BUDGET = 0.5


@dataclass(frozen=True)
class Setup:
    """What a method is built from.

    Attributes:
        peaks: bytes of the steps that budgets are shares of ("plain", "checkpoint"), once measured.
        functions: what has been compiled, by the name of its use: a network built again does not compile again.
    """

    case: Case
    network: Network
    gamma: float
    backend: str
    peaks: dict[str, int] = field(default_factory=dict)
    functions: dict[str, Callable[[nn.Module, Tensor], Tensor]] = field(default_factory=dict)

    def room(self, share: float, of: str) -> int:
        """A budget in bytes."""
        if of not in self.peaks:
            raise ValueError(f"a budget is a share of what {of} takes, which was not measured: add the method {of!r}.")
        return int(share * self.peaks[of])

    def compiled(self, use: str) -> Callable[[nn.Module, Tensor], Tensor]:
        """`run`, compiled for this use."""
        if use not in self.functions:
            self.functions[use] = compiled(self.backend)
        return self.functions[use]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: as it is written; `about`: one line for people.
        build: makes the network that runs this way.
        twin: makes the network in a given memory mode whose gradients must be the same bits (ours only).
        twins: names that network: methods of one name share it.
        applies: whether the method is for this case.
        around: a context for every forward and backward pass.
        inside: backward runs under autocast and on the calling thread: the packages that invert inside an
            `autograd.Function` would otherwise invert in another precision than they ran in.
        share: for those that are given a budget.
        compiles: casts of weights are part of the compiled code, and autocast has none to keep.
        graphed: the whole step is captured in a CUDA graph and replayed.
    """

    name: str
    about: str
    build: Callable[[Setup], nn.Module]
    twin: Callable[[Setup, str], nn.Module] | None = None
    twins: str = ""
    applies: Callable[[Case], bool] = lambda case: True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    inside: bool = False
    share: tuple[float, str] | None = None
    compiles: bool = False
    graphed: bool = False


class Missing(Exception):
    """The method needs what is not here."""


class Chain(nn.Module):
    """Runs `call(block, x)` for each block."""

    def __init__(self, blocks: Sequence[nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(blocks), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


again = partial(checkpoint, use_reentrant=False)
again_without_rng = partial(again, preserve_rng_state=False)  # reading the generator's state cannot be captured


def _to_the_end(block: nn.Module, x: Tensor) -> Tensor:
    """Checkpointed, and run again to its end, as a block that is reversed must be: its last product too, which no gradient needs."""
    with set_checkpoint_early_stop(False):
        return again(block, x)


def head_again(head: nn.Module) -> nn.Module:
    """The head, checkpointed."""
    return Chain([head], again)


def _chained(call: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[Setup], nn.Module]:
    def build(setup: Setup) -> nn.Module:
        return assembled(setup.network, lambda stage: Chain(list(stage.blocks), call), lambda head: Chain([head], call))

    return build


def _segments(setup: Setup) -> nn.Module:
    """⌈√k⌉ blocks to a segment."""

    def stack(stage: Stage) -> nn.Module:
        blocks = list(stage.blocks)
        length = math.isqrt(len(blocks) - 1) + 1
        return Chain([nn.Sequential(*blocks[i : i + length]) for i in range(0, len(blocks), length)], again)

    return assembled(setup.network, stack, head_again)


_SAVED = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(torch.ops.aten, name)
}  # fmt: skip


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(block: nn.Module, x: Tensor) -> Tensor:
    return again(block, x, context_fn=partial(create_selective_checkpoint_contexts, _policy))


def _compiled_blocks(setup: Setup) -> nn.Module:
    return _chained(setup.compiled("budget"))(setup)


def _compiled_checkpoint(setup: Setup) -> nn.Module:
    call = setup.compiled("checkpoint")
    return assembled(
        setup.network, lambda stage: Chain([Compiled(b, call) for b in stage.blocks], again), head_again
    )  # fmt: skip


def _compiled_whole(setup: Setup) -> nn.Module:
    return Compiled(_chained(run)(setup), setup.compiled("whole"))


def _recompute() -> AbstractContextManager[Any]:
    """Under an activation budget, which the compiler reads when a function first runs."""
    return torch._functorch.config.patch(activation_memory_budget=ACTIVATION_BUDGET)


def ours(options: Ours) -> Method:
    """The method that a description means."""

    def build(setup: Setup) -> nn.Module:
        memory = options.memory if options.share is None else setup.room(*options.share)
        return twin(setup, memory)

    def twin(setup: Setup, memory: str | int) -> nn.Module:
        return (_converted if options.by == "convert" else _stacked)(setup, options, memory)

    return Method(
        str(options), "", build, twin, str(replace(options, memory="auto")), partial(_applies, options), share=options.share,
        compiles=options.blocks == "compiled", graphed=options.step == "graph",
    )  # fmt: skip


def _applies(options: Ours, case: Case) -> bool:
    if options.form == "relu" and not case.images:
        return False
    if options.form == "branch" and case.images:
        return False
    return options.fixed_point != "int16" or case.autocast is not None


def _stacked(setup: Setup, options: Ours, memory: str | int) -> nn.Module:
    """A `MomentumNet` for every stage. Several stages share a budget in proportion to their activations."""
    call = setup.compiled("ours") if options.blocks == "compiled" else None

    def stack(stage: Stage) -> nn.Module:
        blocks = list(stage.blocks) if options.form == "block" else stage.branches()
        if call is not None:
            blocks = [Compiled(block, call) for block in blocks]
        share = memory
        if isinstance(memory, int):
            share = int(memory * stage.size * len(stage.blocks) / setup.network.activations)
        settings = momentum_options(share, _fixed(options), options.verify)
        return rg.MomentumNet(blocks, _gamma(setup, options), form=options.form, **settings)

    return assembled(setup.network, stack, _heads(memory))


def _converted(setup: Setup, options: Ours, memory: str | int) -> nn.Module:
    """`rg.convert` of one model with all stages, planned together. The form of a block is found by it."""
    if options.form != "block" or options.blocks == "compiled":
        raise ValueError("by=convert takes blocks as they are: leave form= and blocks= out.")
    model = assembled(setup.network, lambda stage: Chain([copy.copy(b) for b in stage.blocks], run), _heads(memory))
    stages = [f"{i}.blocks" for i, part in enumerate(model.children()) if isinstance(part, Chain) and part.call is run]
    settings = momentum_options(memory, _fixed(options), options.verify)
    return rg.convert(model, gamma=_gamma(setup, options), stages=stages, **settings)


def _fixed(options: Ours) -> str | tuple[int, torch.dtype]:
    return (16, torch.int32) if options.fixed_point == "given" else options.fixed_point


def _gamma(setup: Setup, options: Ours) -> float:
    return float(options.gamma) if options.gamma else setup.gamma


def _heads(memory: str | int) -> Callable[[nn.Module], nn.Module]:
    return (lambda head: head) if memory == "store" else head_again


def baselines() -> list[Method]:
    """Every method that has a name."""
    from .peers import PEERS

    budget = f"`activation_memory_budget={ACTIVATION_BUDGET}`"
    return [
        Method("plain", "plain autograd: everything is kept", _chained(run)),
        Method(BASELINE, "`torch.utils.checkpoint` of every block", _chained(again)),
        Method("checkpoint-to-end", "the same without its early stop: every block is run again to its end", _chained(_to_the_end)),
        Method("checkpoint-sqrt", "`torch.utils.checkpoint` of segments of ⌈√k⌉ blocks", _segments),
        Method("selective", "selective checkpointing: products, convolutions, attention are kept", _chained(_selective)),
        Method("checkpoint-compiled", "`torch.utils.checkpoint` of every compiled block", _compiled_checkpoint, compiles=True),
        Method("compile-budget", f"`torch.compile` of every block, {budget}", _compiled_blocks, around=_recompute, compiles=True),
        Method(
            "compile-whole-budget", f"`torch.compile` of the whole network, {budget}", _compiled_whole,
            applies=lambda case: "whole" in case.options, around=_recompute, compiles=True,
        ),
        *PEERS,
    ]  # fmt: skip


def method(text: str) -> Method:
    """The method that is written so.

    Raises:
        ValueError: for a name, an option or a value that there is not.
    """
    name, options = parsed(text)
    if name == "ours":
        return ours(described(options))
    found = {method.name: method for method in baselines()}
    if name not in found:
        raise ValueError(f"no method is called {name!r}. There are: {', '.join(found)}, ours[option=value,...].")
    if not options:
        return found[name]
    if options != {"step": "graph"}:
        raise ValueError(f"{name} has one option, step=graph; got {text!r}.")
    build = _chained(again_without_rng) if name == BASELINE else found[name].build
    return replace(found[name], name=f"{name}[step=graph]", build=build, graphed=True)


def standard(case: Case) -> list[str]:
    """What is measured where no methods are named: every baseline, and ours in every mode, in the form that is best for the case."""
    form = "" if case.images else ",form=branch"
    found = [f"ours[memory={mode}{form}]" for mode in MODES]
    if "named" in case.options:
        return ["plain", BASELINE, "momentumnet", *found[:3]]
    if case.images:
        found += ["ours[memory=reverse,form=relu]", "ours[memory=auto,form=relu]", "ours[memory=auto,by=convert]"]
    if case.autocast is not None:
        found += [f"ours[memory=reverse{form},fixed_point=int16]"]
    return [*(method.name for method in baselines()), *found]


def choose(case: Case, texts: Sequence[str] = (), without: Sequence[str] = ()) -> list[Method]:
    """The methods for this case: those that are written, or the standard ones; less those with a part of `without` in their name."""
    chosen = [method(text) for text in texts or standard(case)]
    return [m for m in chosen if m.applies(case) and not any(part in m.name for part in without)]
