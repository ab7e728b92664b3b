"""`MomentumNet`: residual blocks run as a momentum network, with memory to choose.

    v ← γ·v + (1−γ)·f(x)        x ← x + v                  [sander2021, eq. 2]
    x ← x − v                   v ← (v − (1−γ)·f(x)) / γ   [sander2021, eq. 3]

Every way of remembering runs the same integer recurrence and gives the same bits, of outputs and of gradients. γ = 0 is the plain
residual network x ← x + f(x), run as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..arithmetic.fixed import FixedPoint
from ..memory.budget import Observer, Scheduler
from ..memory.modes import MemoryPlan, Stack, parse_memory
from ..reverse.checks import CHOICES as VERIFY
from ..reverse.extra import Extra
from ..reverse.forward import Pass
from ..reverse.inputs import check_input, check_surroundings
from ..reverse.momentum import Momentum
from ..reverse.parts import Memo
from ..reverse.range import Range
from ..reverse.recurrence import FORMS, RandomSign, Recurrence, check_reversible, gamma_of, recurrence_of
from ..reverse.residual import PlainPass
from ..reverse.sign import Signed
from . import saved
from .checks import Choice, choice, modules
from .inverse import State, rewound
from .relu import whole

Gamma = float | Iterable[float] | RandomSign


class MomentumNet(saved.Described, nn.Module):
    """A stack of residual blocks as a momentum network.

    Args:
        blocks: modules that map x, and any extra inputs, to a tensor like x. The same block may occur several times.
        gamma: γ in [0, 1], one for all blocks or one each. A float stands for the nearest ratio of small integers. At γ = 1,
            v ← v + f(x): the Hamiltonian limit. `RandomSign(1/16)`: +γ or −γ for each sample of each block in training, the plain
            network in evaluation.
        form: "branch": the blocks compute f(x); "block": they compute x + f(x) (or relu(x + f(x)), or whatever they make of x);
            "relu": they compute f(x), of a network x ← relu(x + f(x)). That is the network of "block" in fewer passes over memory; one
            bit an element and block is kept from forward to backward.
        velocity: v₀: None for 0, "first" for f(x₀) of the first block, or a module (or function) of x₀.
        memory: "reverse" recovers activations by running backward; "checkpoint" keeps each block's input; "store" keeps everything;
            "auto" takes the leaner of the first two. Or a budget: how much memory a training step may take at its highest point, above
            parameters, gradients and the input, as bytes ("8GB", 8e9) or as a fraction of the device's memory (0.5). Within it the
            blocks keep as much as fits, from the last one down, and take less time; `plan` says how many. The way never changes a bit
            of any result.
        fixed_point: "auto" keeps the range of the integers in step with the activations; "int16" does the same in 16 bits, for networks
            that compute in bfloat16 or float16: half the bytes; or the `FixedPoint` to use always.
        verify: "auto" proves of every backward pass that the blocks, run again, repeated themselves, and raises `ReplayError` if not:
            at its end on a CPU, at the start of a later pass on an accelerator, which is not waited for. "strict" compares everything
            and raises before the block's gradients are made, on any device. "off": blocks with random numbers or state of their own
            may give wrong gradients.
        overflow: "raise" if a block returns NaN or Inf (or leaves a range that was given); "nan" gives NaN instead.

    Shape:
        x: any floating-point tensor; the output and every block's output have its shape and dtype.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)]
    >>> net = MomentumNet(blocks, gamma=0.9, memory="reverse")
    >>> net(torch.ones(2, 4)).sum().backward()
    >>> blocks[0][0].weight.grad.shape
    torch.Size([4, 4])
    """

    verify: Any = Choice("what is compared in backward", VERIFY)
    overflow: Any = Choice("what happens where a value is not finite", ("raise", "nan"))
    form_of_steps: str | None = None
    """The form that the steps have, if not that of the blocks."""

    def __init__(
        self, blocks: Iterable[nn.Module], gamma: Gamma = 0.9, *,
        form: str = "branch", velocity: str | Callable[[Tensor], Tensor] | None = None, memory: str | int | float = "auto",
        fixed_point: str | FixedPoint = "auto", verify: str = "auto", overflow: str = "raise",
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(modules(blocks))
        self._form = choice("form", form, FORMS)
        self.verify = verify
        self.overflow = overflow
        if velocity is not None and velocity != "first" and not callable(velocity):
            raise ValueError(f"velocity must be None, 'first', or a module or function of x; got {velocity!r}.")
        self.velocity = velocity
        self.range = Range(fixed_point)
        self.memo = Memo()
        self.plan: MemoryPlan | None = None  # of the last pass
        self._memory = memory
        mode, budget = parse_memory(memory)
        self._scheduler = Scheduler(budget)
        self._stack = Stack("network", Recurrence((), "branch"), mode)
        self.gamma = gamma

    @property
    def gamma(self) -> Any:
        """γ as a ratio, or one ratio per block where they differ; a `RandomSign` of that. May be set, between passes."""
        return gamma_of(self.recurrence)

    @gamma.setter
    def gamma(self, gamma: Gamma) -> None:
        form = self.form_of_steps or self.form
        recurrence = recurrence_of(gamma, len(self.blocks), form, self.range.narrow)
        check_reversible(self._stack.mode, recurrence)
        self._stack.recurrence = recurrence

    @property
    def recurrence(self) -> Recurrence:
        """What the network computes, apart from its blocks."""
        return self._stack.recurrence

    @property
    def form(self) -> str:
        """What the blocks compute."""
        return self._form

    @property
    def memory(self) -> Any:
        """The memory mode, or the budget. May be set, between passes."""
        return self._memory

    @memory.setter
    def memory(self, memory: str | int | float) -> None:
        mode, budget = parse_memory(memory)
        check_reversible(mode, self.recurrence)
        self._memory = memory
        self._stack.mode = mode
        self._scheduler.budget = budget

    @property
    def fixed_point(self) -> FixedPoint | str:
        """The fixed point in use, or the setting before the first pass."""
        return self.range.now

    @torch._disable_dynamo  # the pass itself is not for the compiler; compiled blocks are
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x_K, the last x. Extra inputs go to every block."""
        if self._scheduler.budget is not None:
            check_input(x)
            self._stack.kind = self.described["velocity"], sum(map(whole, self._steps()))
            self._scheduler.schedule(self, [self._stack], (x, *args), kwargs)
        run = self._run(x, Extra(args, kwargs))
        if self._stack.recorder is not None:
            self._stack.recorder.done()
        return run.finish()

    def encode(self, x: Tensor, *args: Any, **kwargs: Any) -> State:
        """The final state, from which `inverse` recovers x (as fixed point holds it) bit for bit."""
        check_reversible("reverse", self._in_mode())
        run = self._run(x, Extra(args, kwargs), encoding=True)
        held = run.state.copy()
        return State(x=run.finish(), v=run.rest(), fixed=held.fixed, held=held, start=run.start, grad_mode=run.tracked)

    def inverse(self, state: State, *args: Any, **kwargs: Any) -> Tensor:
        """x₀ from the final state: the x given to `encode`, to the bit of its fixed-point value."""
        check_reversible("reverse", self._in_mode())
        x0: Tensor = rewound(self, state, self._steps(), Extra(args, kwargs)).pull(-1)
        return x0

    def _run(self, x0: Tensor, extra: Extra, encoding: bool = False) -> Pass:
        """One forward pass. `encoding`: all blocks are reversed, whatever the memory mode, and the start is to be known again."""
        stack, depth = self._stack, len(self.blocks)
        recurrence = stack.recurrence
        in_mode = recurrence if self.training else recurrence.in_evaluation
        plain = in_mode.residual
        if plain:
            check_input(x0)
            self.range.deferred.collect(x0)
        else:
            seen = self.range.begin(
                x0, depth + 1, training=self.training, overflow=self.overflow, most_guard=recurrence.most_guard, stepwise=encoding,
            )  # fmt: skip
        plan = MemoryPlan(depth, 0, 0)
        if not encoding:
            known = None if stack.planned is not None else in_mode.plans.get((x0.dtype, stack.mode))
            plan = self.plan = known or stack.plan_for(x0.dtype, self.training)
        observer = None if stack.recorder is None else stack.recorder.observer(stack, x0, self.training)
        ways: dict[str, Any] = {
            "reversed": plan.reversed, "kept": plan.kept, "verify": self.verify, "memo": self.memo, "deferred": self.range.deferred,
            "look": None if observer is None else observer.look,
        }  # fmt: skip
        if plain:
            if plan.kept and torch.is_grad_enabled():
                check_surroundings()
            run: Pass = PlainPass(x0, self.form, depth, **ways)
        else:
            kind = Signed if recurrence.signed else Momentum
            run = Pass(kind(x0, recurrence, seen, reversible=plan.reversed == depth), x0, depth, **ways)
        if self.velocity is not None and not plain:
            self._launch(run, extra, observer)
        if encoding:
            run.start = run.state.hash()
        for k, block in enumerate(self._steps()):
            form = "block" if recurrence.form == "relu" and whole(block) else None
            run.step(block if observer is None else observer.watch(k, block), extra, form=form)
        if not plain:
            run.look_back()
            self.range.learn(run.state.range)
        return run

    def _steps(self) -> tuple[Any, ...]:
        """What takes the steps: the blocks."""
        values = len(self._stack.recurrence.gammas)
        if values != len(self.blocks):
            raise ValueError(
                f"the network has {len(self.blocks)} blocks now, and {values} values of gamma. Set net.gamma after adding or "
                "removing blocks."
            )
        return tuple(self.blocks)

    def _launch(self, run: Pass, extra: Extra, observer: Observer | None) -> None:
        """Set v₀, which is not 0."""
        block: Any = self.velocity
        form = "branch"
        if self.velocity == "first":
            block = self._steps()[0]
            form = "block" if whole(block) else self.recurrence.form
        else:
            extra = Extra((), {})
        run.launch(block if observer is None else observer.watch(-1, block), extra, form)

    def _in_mode(self) -> Recurrence:
        """What the network computes, in training or in evaluation."""
        return self.recurrence if self.training else self.recurrence.in_evaluation

    @property
    def described(self) -> dict[str, Any]:
        """The network for a `state_dict`."""
        velocity = self.velocity if isinstance(self.velocity, str | None) else "own"
        return {"gamma": saved.written(gamma_of(self.recurrence)), "form": self.form, "velocity": velocity}

    def extra_repr(self) -> str:
        velocity = repr(self.velocity) if self.velocity in (None, "first") else type(self.velocity).__name__
        return (
            f"{self.recurrence}, velocity={velocity}, memory={self.memory!r}, "
            f"fixed_point={self.fixed_point!r}, verify={self.verify!r}"
        )
