"""`MomentumNet`: residual blocks run as a momentum network, with memory to choose.

    v ← γ·v + (1−γ)·f(x)        x ← x + v                  [sander2021, eq. 2]
    x ← x − v                   v ← (v − (1−γ)·f(x)) / γ   [sander2021, eq. 3]

Every memory mode runs the same integer recurrence and gives the same bits, of outputs and of gradients. γ = 0 is the plain
residual network x ← x + f(x), run as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..core.call import Extra
from ..core.errors import RangeOverflow
from ..core.fixedpoint import FixedPoint, integer_dtype
from ..core.parts import Memo
from ..core.rational import as_ratios
from ..memory.budget import Observer, Scheduler, Stack
from ..memory.fake import is_fake
from ..memory.modes import MemoryPlan, leanest, parse_memory
from ..stack.aside import copied_buffers, rng_kept
from ..stack.calibrate import Range, apart, narrow, peaks, several_processes, unheard
from ..stack.forward import Forward, Like
from ..stack.inputs import check_input, check_surroundings
from ..stack.later import Later
from ..stack.momentum import FORMS, Momentum, Recurrence
from ..stack.proof import CHOICES as VERIFY
from ..stack.rectified import whole
from ..stack.residual import grouped, residual
from ..stack.uncompiled import uncompiled

Gamma = float | Iterable[float]


@dataclass(frozen=True, eq=False)
class State:
    """The end of a forward pass: `x` and `v` as floats, and the integers from which the start can be recovered."""

    x: Tensor
    v: Tensor
    integers: tuple[Tensor, Tensor] = field(repr=False)
    buffers: tuple[Tensor | None, ...] = field(repr=False)
    recurrence: Recurrence = field(repr=False)
    fixed: FixedPoint
    grad_mode: bool = field(repr=False)  # blocks may take other kernels without it


class MomentumNet(nn.Module):
    """A stack of residual blocks as a momentum network.

    Args:
        blocks: modules that map x, and any extra inputs, to a tensor like x. The same block may occur several times.
        gamma: γ in [0, 1], one for all blocks or one each. A float stands for the nearest ratio of small integers. At
            γ = 1, v ← v + f(x): the Hamiltonian limit.
        form: "branch": the blocks compute f(x); "block": they compute x + f(x) (or relu(x + f(x)), or whatever they make of x);
            "relu": they compute f(x), of a network x ← relu(x + f(x)): as "block" with the addition and the relu in the blocks, in
            fewer passes over memory, and one bit an element and block is kept from forward to backward.
        velocity: v₀: None for 0, "first" for f(x₀) of the first block, or a module (or function) of x₀.
        memory: "reverse" recovers activations by running backward; "checkpoint" keeps each block's input; "store" keeps
            everything; "auto" takes the leaner of the first two. Or a budget: how much memory a training step of this network may
            take at its highest point, above parameters, gradients and its input, as bytes (8e9, "8GB") or as a fraction of the
            device's memory (0.5). Counted are what is held from forward to backward, what a block has at hand while it is run
            again and differentiated, the output, a loss, and 5 % for what kernels take for themselves. Within it blocks keep their
            input, or all their tensors, from the last one down, and take less time; `plan` says how many. `memory` never changes a
            bit of any result.
        every: one momentum step for so many consecutive blocks, which are run as plain residual blocks inside it. Fewer
            integer steps; γ then counts per group. Another network than with every=1, with the same parameters and `state_dict`.
        fraction_bits: binary digits after the point of the fixed-point state; "auto" calibrates them and keeps watch.
        state_bits: width of the integers that hold x and v: "auto" is 64 for float64 and 32 for all others. 16 is for networks that
            compute in bfloat16 or float16: half the bytes to hold and to move (also of float32 inputs that are kept), and about the
            rounding of those dtypes, as long as the largest activation is not more than some twenty times the usual one.
        verify: "auto" proves of every backward pass that the blocks, run again, repeated themselves, and raises `ReplayError` if
            not: at its end on a CPU; at the start of a later pass on an accelerator, which is not waited for. "end" raises in the
            pass itself on any device and puts gradients back as they were; "blocks" also names the block, and compares its whole
            output and what it saved for autograd, so that what enters the gradient alone is seen too.
            "off": blocks with random numbers or state of their own may give wrong gradients.
        overflow: "raise" if a value leaves the fixed-point range or is not finite; "nan" gives NaN instead.

    Shape:
        x: any floating-point tensor; the output and every block's output have its shape and dtype.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)]
    >>> net = MomentumNet(blocks, gamma=0.9, memory="reverse")
    >>> net(torch.ones(2, 4)).sum().backward()
    >>> blocks[0][0].weight.grad.shape
    torch.Size([4, 4])
    """

    def __init__(
        self, blocks: Iterable[nn.Module], gamma: Gamma = 0.9, *,
        form: str = "branch", velocity: str | Callable[[Tensor], Tensor] | None = None, memory: str | int | float = "auto",
        fraction_bits: int | str = "auto", verify: str = "auto", overflow: str = "raise",
        every: int = 1, state_bits: int | str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(_modules(blocks))
        self._form = _choice("form", form, FORMS)
        self.verify = _choice("verify", verify, VERIFY)
        self.overflow = _choice("overflow", overflow, ("raise", "nan"))
        if velocity is not None and velocity != "first" and not callable(velocity):
            raise ValueError(f"velocity must be None, 'first', or a module or function of x; got {velocity!r}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of blocks from 1 on; got {every!r}.")
        self.velocity, self.every = velocity, every
        self.range = Range(fraction_bits, narrow(state_bits))
        self.memo = Memo()
        self.plan: MemoryPlan | None = None  # of the last pass
        self._memory = memory
        mode, budget = parse_memory(memory)
        self._scheduler = Scheduler(budget)
        self._stack = Stack("network", Recurrence((), "branch"), mode)
        self.gamma = gamma

    @property
    def gamma(self) -> Any:
        """γ as a ratio, or one ratio per block where they differ. May be set, between passes."""
        ratios = self.recurrence.gammas
        return ratios[0] if len(set(ratios)) == 1 else ratios

    @gamma.setter
    def gamma(self, gamma: Gamma) -> None:
        self._steps_of, self._blocks = grouped(list(self.blocks), self.every, self.form), tuple(self.blocks)
        form = self._form_of_steps if self.every == 1 else "block"
        recurrence = Recurrence(as_ratios(gamma, len(self._steps_of)), form, self.range.narrow)
        _check_reversible(self._stack.mode, recurrence)
        self._stack.recurrence = recurrence

    @property
    def recurrence(self) -> Recurrence:
        """What the network computes, apart from its blocks."""
        return self._stack.recurrence

    @property
    def form(self) -> str:
        """Whether the blocks compute f(x) ("branch", "relu") or x + f(x) ("block")."""
        return self._form

    @property
    def _form_of_steps(self) -> str:
        return self.form

    @property
    def memory(self) -> str | int | float:
        """The memory mode or the budget, as given. May be set, between passes."""
        return self._memory

    @memory.setter
    def memory(self, memory: str | int | float) -> None:
        mode, budget = parse_memory(memory)
        _check_reversible(mode, self.recurrence)
        self._memory, self._scheduler.budget = memory, budget
        self._stack.mode, self._stack.planned, self._stack.recorder = mode, None, None

    @property
    def fraction_bits(self) -> int | str:
        """The fraction bits in use, or "auto" before the first pass."""
        fixed = next(iter((self.range.of(self.training).fixed or self.range.fixed).values()), None)
        return self.range.setting if fixed is None else fixed.bits

    @uncompiled  # the pass itself is not for the compiler; compiled blocks are
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_K, the last x. Extra inputs go to every block."""
        check_input(x)
        extra = Extra(args, kwargs)
        if any(self.recurrence.gammas):
            run = self._run(x, extra)
            y = run.x if is_fake(x) and x.device.type == "cpu" else run.finish()
        else:
            y = self._residual(x, extra)
        if self._stack.recorder is not None:
            self._stack.recorder.done()
        return y

    def _residual(self, x: Tensor, extra: Extra) -> Tensor:
        """The plain residual network, at γ = 0."""
        plan, fake = self._planned(x, extra), is_fake(x)
        observer = self._stack.observer(x)
        if plan.replayed and torch.is_grad_enabled():
            check_surroundings()
        return residual(
            _watched(self._groups(), observer),
            self.form,
            x,
            extra,
            verify="off" if fake else self.verify,
            memo=self.memo,
            later=Later() if fake else self.range.later,
            stored_from=plan.replayed,
            look=None if observer is None else observer.look,
        )

    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> State:
        """The final state, from which `inverse` recovers x (as fixed point holds it) bit for bit."""
        check_input(x)
        _check_reversible("reverse", self.recurrence)
        run = self._run(x, Extra(args, kwargs), reversible=True)
        held = run.state
        buffers = tuple(None if b is None else b.clone() for b in held.buffers)
        return State(
            run.finish(),
            run.velocity(),
            (held.x.clone(), held.v.clone()),
            buffers,
            self.recurrence,
            held.fixed,
            run.tracked,
        )

    @torch.no_grad()
    def inverse(self, state: State, *args: Any, **kwargs: Any) -> Tensor:
        """x₀ from the final state: the x given to `encode`, to the bit of its fixed-point value."""
        _check_reversible("reverse", self.recurrence)
        if not isinstance(state, State) or state.recurrence != self.recurrence:
            source = _describe(state.recurrence) if isinstance(state, State) else type(state).__name__
            raise ValueError(
                f"this is not a state of this network: {source}, against {_describe(self.recurrence)} here. "
                "Invert what `encode` of the same network returned."
            )
        extra, held = (
            Extra(args, kwargs),
            Momentum(state.x, self.recurrence, state.fixed, reversible=True, overflow="nan"),
        )
        held.x, held.v = (q.clone() for q in state.integers)
        held.start = None
        held.buffers = [None if b is None else b.clone() for b in state.buffers]
        with copied_buffers(self.modules()):
            for k, block in reversed(list(enumerate(self._groups()))):
                x = held.pull()
                with torch.set_grad_enabled(state.grad_mode):
                    y = block(x, *extra.args, **extra.kwargs)
                held.whole |= {k} if whole(block) else set()
                held.retreat(k, Like(x).checked(y, f"block {k}"))
            x0, launch = held.read(), self._launch(extra)
            with torch.set_grad_enabled(state.grad_mode):
                start = Forward(x0, self.recurrence, state.fixed, mode="store", overflow="nan")
                if launch is not None:
                    start.launch(*launch)
        if not held.rewound(start.state.v):
            raise ValueError(
                "this state did not rewind to a start of this network. It was encoded with other parameters or other extra "
                "inputs, or a block does not repeat itself (dropout in training mode, say: call .eval() first)."
            )
        return x0

    def _run(self, x0: Tensor, extra: Extra, reversible: bool = False) -> Forward:
        """One forward pass."""
        check_surroundings()
        plan = self._planned(x0, extra, budgeted=not reversible)
        if is_fake(x0):
            integers = FixedPoint(0, integer_dtype(x0.dtype, self.recurrence.narrow))
            return self._steps(x0, extra, integers, overflow="nan", observer=self._stack.observer(x0), **plan.arguments)
        settings: dict[str, Any] = {
            "verify": self.verify,
            "overflow": self.overflow,
            "reversible": reversible,
            "later": self.range.later,
            "observer": None if reversible else self._stack.observer(x0),
            **plan.arguments,
        }
        try:
            run = self._steps(x0, extra, self._fixed(x0, extra), **settings)
        except RangeOverflow:
            self.range.of(self.training).overflowed()
            if self.training or self.range.setting != "auto" or several_processes():  # others run their blocks once
                raise
            run = self._steps(
                x0, extra, self._fixed(x0, extra), **settings
            )  # in eval mode nothing has been touched yet
        self.range.of(self.training).seen(run.state)
        return run

    def _fixed(self, x0: Tensor, extra: Extra) -> FixedPoint:
        return self.range.of(self.training).for_input(x0, self.recurrence.most_guard, lambda: self._survey(x0, extra))

    def _steps(
        self, x0: Tensor, extra: Extra, fixed: FixedPoint | None, observer: Observer | None = None, **settings: Any
    ) -> Forward:
        look = None if observer is None else observer.look
        run = Forward(x0, self.recurrence, fixed, memo=self.memo, look=look, **settings)
        launch = self._launch(extra)
        if launch is not None:
            block, own, form = launch
            run.launch(block if observer is None else observer.watch(-1, block), own, form)
        for block, watched in zip(self._groups(), _watched(self._groups(), observer), strict=True):
            run.step(watched, extra, whole=whole(block))
        return run

    def _groups(self) -> tuple[Any, ...]:
        """The blocks, or groups of them, that take a step each."""
        if len(self._blocks) != len(self.blocks):
            raise ValueError(
                f"the network has {len(self.blocks)} blocks now, and {len(self.recurrence.gammas)} values of gamma. Set net.gamma "
                "after adding or removing blocks."
            )
        if not all(map(is_, self._blocks, self.blocks)):
            self._steps_of, self._blocks = grouped(list(self.blocks), self.every, self.form), tuple(self.blocks)
        return self._steps_of

    def _planned(self, x: Tensor, extra: Extra, budgeted: bool = True) -> MemoryPlan:
        """The plan of this pass."""
        stack = self._stack
        if budgeted:
            stack.strict = self.verify in ("end", "blocks")
            if self._scheduler.budget is not None:
                velocity = self.velocity if isinstance(self.velocity, str | None) else "own"
                stack.kind = velocity, sum(map(whole, self._groups()))
            self._scheduler.schedule(self, [stack], (x, *extra.args), extra.kwargs)
        self.plan = stack.plan_for(x.dtype) if budgeted else leanest(self.recurrence, x.dtype, stack.mode)
        return self.plan

    @torch.no_grad()
    def _survey(self, x0: Tensor, extra: Extra) -> tuple[float, float]:
        """The largest |x| and |v| of a pass, leaving no trace."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # or weights cast here, without gradients, would be found there later
        try:
            with (
                rng_kept(extra.devices(x0), extra.generators),
                copied_buffers(self.modules()),
                unheard(self.modules()),
                saved_tensors_hooks(
                    _itself, _itself
                ),  # a checkpoint around the network is not to count what is saved here
            ):
                extra = Extra(apart(extra.args), apart(extra.kwargs))
                run = self._steps(x0, extra, None, mode="store", overflow=self.overflow)
        finally:
            torch.set_autocast_cache_enabled(cached)
        return peaks(run.state.watch, run.state.fixed)

    def _launch(self, extra: Extra) -> tuple[Any, Extra, str] | None:
        """What makes v₀, its extra inputs, and its form."""
        if self.velocity == "first":
            first = self._groups()[0]
            return first, extra, "block" if whole(first) else self.recurrence.form
        return None if self.velocity is None else (self.velocity, Extra((), {}), "branch")

    def extra_repr(self) -> str:
        velocity = repr(self.velocity) if self.velocity in (None, "first") else type(self.velocity).__name__
        return (
            f"{_describe(self.recurrence)}, velocity={velocity}, memory={self.memory!r}, "
            f"fraction_bits={self.fraction_bits!r}, verify={self.verify!r}"
        )


def _itself(t: Tensor) -> Tensor:
    return t


def _watched(blocks: Iterable[Any], observer: Observer | None) -> Iterator[Any]:
    """The blocks, as a pass that is observed runs them."""
    return (block if observer is None else observer.watch(k, block) for k, block in enumerate(blocks))


def _describe(recurrence: Recurrence) -> str:
    ratios = recurrence.gammas
    gamma = str(ratios[0]) if len(set(ratios)) == 1 else f"{min(ratios)}…{max(ratios)}"
    return f"depth={len(ratios)}, gamma={gamma}, form={recurrence.form!r}"


def _modules(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise TypeError(
            f"blocks must be several modules; got one {type(blocks).__name__}. Pass [block] * depth to repeat it."
        )
    listed = list(blocks)
    if not listed:
        raise ValueError("blocks is empty: a momentum network needs at least one block.")
    for k, block in enumerate(listed):
        if not isinstance(block, nn.Module):
            raise TypeError(f"block {k} must be an nn.Module; got {type(block).__name__}. Wrap a function in a module.")
    return listed


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}.")
    return value


def _check_reversible(memory: str, recurrence: Recurrence) -> None:
    if memory == "reverse" and recurrence.plain:
        raise ValueError(
            "gamma = 0 is a plain residual network, which cannot be run in reverse: its step forgets v. Use "
            "memory='checkpoint', 'store' or 'auto', or a gamma above 0."
        )
