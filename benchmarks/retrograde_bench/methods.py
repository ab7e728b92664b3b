"""How a stage of blocks is run, and what is remembered: the rows of the table.

Whatever the method, blocks outside of the stacks (a ResNet stage's first, which changes the shape) are checkpointed, save
where nothing else is ("plain", "ours-store") or where a package has its own way with them ("momentumnet").
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
from retrograde.memory.schedule import with_reserve

from .cases import Case, selected
from .compiling import Compiled, compiled, run
from .networks import Network, Stage, assembled

BASELINE = "checkpoint"
ACTIVATION_BUDGET = 0.5
Budget = tuple[float | None, str]
"""A share (None: the case's own) of the peak of a method."""
FITTED: Budget = (None, BASELINE)
SWEEP = (10, 20, 35, 50, 75, 100)  # budgets, in % of plain's peak


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

    def room(self, budget: Budget) -> int:
        """A budget in bytes. The case's own share is of what is measured: the planner's reserve comes on top."""
        share, of = budget
        if of not in self.peaks:
            raise ValueError(f"a budget is a share of what {of} takes, which was not measured: add the method {of!r}.")
        return with_reserve(int(self.case.share * self.peaks[of])) if share is None else int(share * self.peaks[of])

    def compiled(self, use: str) -> Callable[[nn.Module, Tensor], Tensor]:
        """`run`, compiled for this use."""
        if use not in self.functions:
            self.functions[use] = compiled(self.backend)
        return self.functions[use]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: for `--methods`; `about`: one line for people.
        build: makes the network that runs this way.
        twin: makes the network in a given memory mode whose gradients must be the same bits (ours only).
        twins: names that network: methods of one name share it.
        applies: whether the method is for this case.
        around: a context for every step.
        inside: backward runs under autocast and on the calling thread: the packages that invert inside an
            `autograd.Function` would otherwise invert in another precision than they ran in.
        budget: for those that are given one.
        compiles: casts of weights are part of the compiled code, and autocast has none to keep.
        graphed: the whole step is captured in a CUDA graph and replayed. Only measured where asked for by name.
    """

    name: str
    about: str
    build: Callable[[Setup], nn.Module]
    twin: Callable[[Setup, str], nn.Module] | None = None
    twins: str = ""
    applies: Callable[[Case], bool] = lambda case: True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    inside: bool = False
    budget: Budget | None = None
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


def _momentum(
    setup: Setup, memory: str, form: str, compile_blocks: bool, budget: Budget | None, **options: Any
) -> nn.Module:
    """Ours. A budget bounds the peak of the step; several stages share it in proportion to their activations."""
    call = setup.compiled("ours") if compile_blocks else None
    room = None if budget is None else setup.room(budget)

    def stack(stage: Stage) -> nn.Module:
        blocks = list(stage.blocks) if form == "block" else stage.branches()
        if call is not None:
            blocks = [Compiled(block, call) for block in blocks]
        kept: str | int = memory
        if room is not None and memory == "auto":
            kept = int(room * stage.size * len(stage.blocks) / setup.network.activations)
        return rg.MomentumNet(blocks, setup.gamma, form=form, memory=kept, **options)

    return assembled(setup.network, stack, (lambda head: head) if memory == "store" else head_again)


def _converted(setup: Setup, memory: str, budget: Budget | None = None, **options: Any) -> nn.Module:
    """Ours by `rg.convert`: the stages of one model, planned together. Heads are checkpointed as everywhere."""
    heads = (lambda head: head) if memory == "store" else head_again
    own = partial(map, copy.copy)  # the blocks themselves are for other methods too
    model = assembled(setup.network, lambda stage: Chain(list(own(stage.blocks)), run), heads)
    stages = [f"{i}.blocks" for i, part in enumerate(model.children()) if isinstance(part, Chain) and part.call is run]
    kept = memory if budget is None or memory != "auto" else setup.room(budget)
    return rg.convert(model, gamma=setup.gamma, stages=stages, memory=kept, **options)


def _by_convert(
    name: str, about: str, budget: Budget | None, applies: Callable[[Case], bool] = lambda case: case.images, **options: Any
) -> Method:  # fmt: skip
    return Method(
        f"ours-{name}",
        about,
        lambda setup: _converted(setup, "auto", budget, **options),
        lambda setup, mode: _converted(setup, mode, **options),
        f"convert, {options}",
        applies,
        budget=budget,
    )


def _ours(
    name: str, about: str, memory: str, *, form: str = "block", compile_blocks: bool = False, budget: Budget | None = None,
    applies: Callable[[Case], bool] = lambda case: True, **options: Any,
) -> Method:  # fmt: skip
    def twin(setup: Setup, mode: str) -> nn.Module:
        return _momentum(setup, mode, form, compile_blocks, budget, **options)

    key = f"{form}, compiled={compile_blocks}, {options}"
    return Method(
        f"ours-{name}",
        about,
        lambda setup: twin(setup, memory),
        twin,
        key,
        applies,
        budget=budget,
        compiles=compile_blocks,
    )


def _tokens(case: Case) -> bool:
    return not case.images


def _images(case: Case) -> bool:
    return case.images


def _low(case: Case) -> bool:
    return case.autocast is not None


def _deep(case: Case) -> bool:
    return "deep" in case.options


def _sweep(case: Case) -> bool:
    return "budgets" in case.options


def _fitted() -> list[Method]:
    """Ours, given the share of checkpoint's memory that the case aims at."""
    aim = "ours, auto, within the memory aimed at"

    def narrow_images(case: Case) -> bool:
        return _low(case) and case.images

    def narrow_tokens(case: Case) -> bool:
        return _low(case) and _tokens(case)

    return [
        _by_convert("fitted", aim, FITTED),
        _by_convert("fitted-16bit", f"{aim}, state_bits=16", FITTED, narrow_images, state_bits=16),
        _ours("fitted-branch", f'{aim}, form="branch"', "auto", form="branch", budget=FITTED, applies=_tokens),
        _ours(
            "fitted-branch-16bit", f'{aim}, form="branch", state_bits=16', "auto", form="branch", budget=FITTED, state_bits=16,
            applies=narrow_tokens,
        ),
        _ours(
            "fitted-branch-16bit-unchecked", f'{aim}, form="branch", state_bits=16, verify="off"', "auto", form="branch",
            budget=FITTED, state_bits=16, verify="off", applies=narrow_tokens,
        ),
        _ours(
            "fitted-branch-16bit-compiled", f'{aim}, form="branch", state_bits=16, every block compiled', "auto", form="branch",
            budget=FITTED, state_bits=16, compile_blocks=True, applies=narrow_tokens,
        ),
        _ours(
            "fitted-every2", f"{aim}, one momentum step for two layers", "auto", form="branch", budget=FITTED, every=2, applies=_deep
        ),
        _ours(
            "fitted-16bit-every2", f"{aim}, one momentum step for two layers, state_bits=16", "auto", form="branch", budget=FITTED,
            every=2, state_bits=16, applies=_deep,
        ),
        _ours(
            "fitted-16bit-every2-unchecked", f'{aim}, one momentum step for two layers, state_bits=16, verify="off"', "auto",
            form="branch", budget=FITTED, every=2, state_bits=16, verify="off", applies=_deep,
        ),
    ]  # fmt: skip


def _swept(name: str, about: str, **options: Any) -> list[Method]:
    """A method given one share of plain's memory after another."""
    return [
        _ours(
            f"{name}-{share}",
            f"{about}, given {share} % of plain's memory",
            "auto",
            budget=(share / 100, "plain"),
            applies=_sweep,
            **options,
        )
        for share in SWEEP
    ]


def methods() -> list[Method]:
    """Every method, in the order of the table."""
    from .peers import PEERS

    whole = f"`activation_memory_budget={ACTIVATION_BUDGET}`"
    return [
        Method("plain", "plain autograd: everything is kept", _chained(run)),
        Method(BASELINE, "`torch.utils.checkpoint` of every block", _chained(again)),
        Method("checkpoint-to-end", "`torch.utils.checkpoint` of every block, without its early stop", _chained(_to_the_end)),
        Method("checkpoint-sqrt", "`torch.utils.checkpoint` of segments of ⌈√k⌉ blocks", _segments),
        Method("selective", "selective checkpointing: products, convolutions, attention are kept", _chained(_selective)),
        Method(
            "checkpoint-compiled", "`torch.utils.checkpoint` of every compiled block", _compiled_checkpoint, compiles=True
        ),
        Method(
            "compile-budget", f"`torch.compile` of every block, {whole}", _compiled_blocks, around=_recompute, compiles=True
        ),
        Method(
            "compile-whole-budget", f"`torch.compile` of the whole network, {whole}", _compiled_whole,
            applies=lambda case: "whole" in case.options, around=_recompute, compiles=True,
        ),
        *PEERS,
        _ours("reverse", "ours, reverse", "reverse"),
        _ours("checkpoint", "ours, checkpoint", "checkpoint"),
        _ours("store", "ours, store", "store"),
        _ours("auto", "ours, auto", "auto"),
        *_swept("budget", "ours, auto"),
        *_swept("narrow-budget", 'ours, auto, form="branch", state_bits=16', form="branch", state_bits=16),
        _by_convert("convert", "ours, `rg.convert` as it comes", None),
        _by_convert("convert-budget-30", "ours, `rg.convert`, given 30 % of plain's memory", (0.3, "plain")),
        *_fitted(),
        _ours("branch-reverse", 'ours, reverse, form="branch": f(x) without x', "reverse", form="branch", applies=_tokens),
        _ours("branch-auto", 'ours, auto, form="branch"', "auto", form="branch", applies=_tokens),
        _ours("branch-store", 'ours, store, form="branch"', "store", form="branch", applies=_tokens),
        _ours("relu-reverse", 'ours, reverse, form="relu": relu(x + f(x)) in the step', "reverse", form="relu", applies=_images),
        _ours("relu-auto", 'ours, auto, form="relu"', "auto", form="relu", applies=_images),
        _ours(
            "relu-unchecked", 'ours, auto, form="relu", verify="off": no replay is checked', "auto", form="relu", verify="off",
            applies=_images,
        ),
        _ours(
            "relu-16bit-auto", 'ours, auto, form="relu", state_bits=16', "auto", form="relu", state_bits=16,
            applies=lambda case: _low(case) and case.images,
        ),
        _ours("16bit-reverse", "ours, reverse, x and v in 16 bits (state_bits=16)", "reverse", state_bits=16, applies=_low),
        _ours("16bit-auto", "ours, auto, state_bits=16", "auto", state_bits=16, applies=_low),
        _ours(
            "branch-16bit-reverse", 'ours, reverse, form="branch", state_bits=16', "reverse", form="branch", state_bits=16,
            applies=lambda case: _low(case) and _tokens(case),
        ),
        _ours(
            "branch-16bit-unchecked", 'ours, reverse, form="branch", state_bits=16, verify="off"', "reverse", form="branch",
            state_bits=16, verify="off", applies=lambda case: _low(case) and _tokens(case),
        ),
        _ours("every2-reverse", "ours, reverse, one momentum step for two blocks (every=2)", "reverse", every=2),
        _ours("every2-auto", "ours, auto, every=2", "auto", every=2),
        _ours("compiled-reverse", "ours, reverse, every block compiled", "reverse", compile_blocks=True),
        _ours(
            "compiled-branch-reverse", 'ours, reverse, form="branch", every block compiled', "reverse", form="branch",
            compile_blocks=True, applies=_tokens,
        ),
        _ours(
            "compiled-branch-16bit-reverse", 'ours, reverse, form="branch", state_bits=16, every block compiled', "reverse",
            form="branch", compile_blocks=True, state_bits=16, applies=lambda case: _low(case) and _tokens(case),
        ),
        _ours(
            "compiled-relu-auto", 'ours, auto, form="relu", every block compiled', "auto", form="relu", compile_blocks=True,
            applies=_images,
        ),
        Method("graph-plain", "plain, the step as one CUDA graph", _chained(run), graphed=True),
        Method("graph-checkpoint", "checkpoint, the step as one CUDA graph", _chained(again_without_rng), graphed=True),
        replace(_ours("reverse", "ours, reverse, the step as one CUDA graph", "reverse"), name="graph-ours-reverse", graphed=True),
        replace(_ours("auto", "ours, auto, the step as one CUDA graph", "auto"), name="graph-ours-auto", graphed=True),
        replace(
            _ours("auto", 'ours, auto, form="relu", the step as one CUDA graph', "auto", form="relu", applies=_images),
            name="graph-ours-relu-auto", graphed=True,
        ),
    ]  # fmt: skip


def choose(case: Case, patterns: Sequence[str], without: Sequence[str] = ()) -> list[Method]:
    """The methods for this case whose names match, less those that match `without`; "*" leaves CUDA graphs out."""
    dropped = {method.name for method in selected(methods(), without, "method")}
    if list(patterns) == ["*"]:
        dropped |= {method.name for method in methods() if method.graphed}
    return [m for m in selected(methods(), patterns, "method") if m.applies(case) and m.name not in dropped]
