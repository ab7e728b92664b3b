"""The fixed-point range of a network: calibrated on its first batch, then kept in step with its activations.

After every pass the largest |x| and |v| seen are compared with the range (`follow`). On an accelerator they are fetched
without waiting, so the range follows a step or two later; the headroom is there for that.

A survey runs the blocks, and blocks may hold collectives (gathers of FSDP2, SyncBatchNorm), so with several processes there is one at
the first pass only, where every rank has one. What a rank finds out later, from its own data, moves its range without running
anything (`widened`).
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..core.fixedpoint import FixedPoint, integer_dtype
from .headroom import HEADROOM, MOST_BITS, calibrated, check_resolution, follow, toward, warn_of_few_digits
from .later import WARM_UP, Later, capturing
from .momentum import Momentum, Outcome, Recurrence, check_range

WIDE = 32


class Wide(FixedPoint):
    """A fixed point for a pass of which nothing is known yet."""


def peaks(watch: Tensor, fixed: FixedPoint) -> tuple[float, float]:
    """The largest |x| and |v| of a pass, as floats of the network; NaN where it left a range that was a guess."""
    if isinstance(fixed, Wide) and not (watch <= fixed.limit).all():
        return math.nan, math.nan
    v, x = watch.nan_to_num(0.0, 0.0).amax(0).tolist()
    return x * 2.0**-fixed.bits, v * 2.0 ** -(fixed.bits + fixed.guard)


def wide(x0: Tensor, recurrence: Recurrence, fraction: int) -> Wide | None:
    """A fixed point for a pass of which nothing is known yet: of its 64 bits `fraction` (in float64 more) are below the largest
    value of the input, the others above. None, without gradients, if the last such pass did not fit: then in floats (`Rough`), so
    that it fits whatever it does, and no batch is held with fewer digits because another was out of all proportion."""
    if fraction < WIDE and not torch.is_grad_enabled():
        return None
    fraction += 8 if x0.dtype == torch.float64 else 0
    peak = float(x0.detach().abs().amax()) if x0.numel() else 0.0
    finest = min(factor for *_, factor in recurrence.factors)  # of the factors on f
    guard = 2 + math.ceil(-math.log2(finest))
    bits = max(min(fraction - math.frexp(peak)[1], MOST_BITS), -64)
    return Wide(bits if math.isfinite(peak) else 0, torch.int64, guard)


def apart(value: Any) -> Any:
    """The value, with lists, dictionaries and sets of its own: a survey may add to them. What is in them is shared."""
    if type(value) is tuple:
        return tuple(map(apart, value))
    if type(value) not in (list, dict, set, deque, defaultdict, OrderedDict):
        return value
    own = copy.copy(value)
    if isinstance(own, dict):
        own.update({key: apart(v) for key, v in value.items()})
    elif not isinstance(own, set):
        own.clear()
        own.extend(map(apart, value))
    return own


@contextmanager
def unheard(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules without their forward hooks, except PyTorch's own (FSDP2 works by them): a survey is not for users to see."""
    kept = [(m._forward_hooks, dict(m._forward_hooks)) for m in modules if m._forward_hooks]
    for own, hooks in kept:
        for key, hook in hooks.items():
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                del own[key]
    try:
        yield
    finally:
        for own, hooks in kept:
            own.clear()
            own.update(hooks)


def holders(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parts of a network that keep their state in fixed point, by name; each has a `range`."""
    for name, module in net.named_modules():
        hidden = module.__dict__.get("momentum")  # a MomentumStage keeps its network out of the module tree
        for part in (module, hidden):
            if isinstance(getattr(part, "range", None), Range):
                yield name, part


def several_processes() -> bool:
    """Whether this process is one of several that train together."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def widened(fixed: FixedPoint, bits: int) -> FixedPoint:
    """A range 2^bits times as wide, for x and v alike."""
    return replace(fixed, bits=max(fixed.bits - bits, -64))


def narrow(state_bits: Any) -> bool:
    """Whether x and v are to be held in 16 bits."""
    if state_bits not in ("auto", 16) or isinstance(state_bits, float):
        raise ValueError(
            f"state_bits must be 'auto' (64 for float64, else 32) or 16, for networks in bfloat16 or float16; got {state_bits!r}."
        )
    return bool(state_bits == 16)


class Range:
    """The fixed point in use, by the integer dtype it is for.

    `other` is for evaluation, and begins as what training has found, if anything: normalisation by running statistics, which lag
    behind, makes other activations than training does.
    """

    training: Range | None = None  # of evaluation: that of training, which may have grown since
    fraction = WIDE  # of passes of which nothing is known yet: see `wide`; less: the last one did not fit

    def __init__(self, setting: Any, narrow: bool = False, other: bool = False) -> None:
        if setting != "auto" and (
            isinstance(setting, bool) or not isinstance(setting, Integral) or not -64 <= int(setting) <= 96
        ):
            raise ValueError(f"fraction_bits must be 'auto' or a whole number from -64 to 96; got {setting!r}.")
        self.setting: int | str = setting if setting == "auto" else int(setting)
        self.narrow = narrow
        self.fixed: dict[torch.dtype, FixedPoint] = {}
        self.later = Later()
        self.begun = False
        self.other: Range | None = None
        if not other:
            self.other = Range(setting, narrow, other=True)
            self.other.later = self.later

    def of(self, training: bool) -> Range:
        """The range of passes in this mode."""
        if training or self.other is None:
            return self
        self.other.training = self
        if self.fixed and not self.other.begun:
            self.other.fixed, self.other.begun = dict(self.fixed), True
        return self.other

    def for_input(self, x: Tensor, most_guard: int, survey: Callable[[], tuple[float, float]]) -> FixedPoint:
        """The fixed point for this pass. Raises here what an earlier pass on an accelerator turns out to have met.

        Args:
            most_guard: guard digits at most.
            survey: finds the largest |x| and the largest |v| of a pass; called where there is none to go by.
        """
        return self.current(x) or self.calibrate(x.dtype, *survey(), most_guard)

    def current(self, x: Tensor) -> FixedPoint | None:
        """The fixed point for this input, if there is anything to go by. Raises as `for_input` does."""
        self.later.collect(x)
        if x.is_meta and torch.is_grad_enabled():
            raise TypeError(
                "a meta tensor has no values, by which the range of this network could be found. rg.plan predicts memory without "
                "them, under torch.no_grad() there is an output without them; else move the model and its input to a device."
            )
        if self.narrow and x.dtype == torch.float64:
            raise ValueError("state_bits=16 cannot hold a float64 network. Use state_bits='auto'.")
        dtype = integer_dtype(x.dtype, self.narrow)
        if isinstance(self.setting, int):
            return FixedPoint(self.setting, dtype)
        fixed = self.fixed.get(dtype)
        if fixed is None and x.is_meta:
            return FixedPoint(0, dtype)  # any will do, and nothing is learnt of it
        if fixed is None and capturing(x):
            raise RuntimeError(WARM_UP)
        if fixed is not None and self.training is not None:
            fixed = toward(fixed, self.training.fixed.get(dtype, fixed))
        if fixed is not None and (over := self._outgrown(x, fixed)):
            if not several_processes():
                return None
            fixed = self.fixed[dtype] = widened(fixed, over)
        return fixed

    def calibrate(self, dtype: torch.dtype, peak_x: float, peak_v: float, most_guard: int) -> FixedPoint:
        """The fixed point for inputs of this dtype, now that the largest values of a pass are known."""
        dtype = integer_dtype(dtype, self.narrow)
        if math.isnan(peak_x):
            return FixedPoint(0, dtype)  # nothing is
        fixed = calibrated(peak_x, peak_v, dtype, most_guard)
        check_resolution(peak_x, fixed)
        self.fixed[dtype] = fixed
        self.begun, self.fraction = True, WIDE
        return fixed

    def seen(self, state: Momentum) -> None:
        """Take note of the largest values of a finished pass."""
        if state.watch.device.type == "cpu":
            self._note(state.watch, state)
        else:
            self.later.tell(state.watch, partial(self._judge, state.outcome()))

    def _judge(self, outcome: Outcome, watch: Tensor, when: str) -> None:
        self._note(watch, outcome)
        if outcome.raises:
            check_range(watch.tolist(), outcome.fixed, outcome.limits)

    def overflowed(self, values: Tensor | None = None, guessed: bool = False) -> None:
        """A pass left its range, with these largest values: the next one gets another. `guessed`: nothing was known of it."""
        if values is not None and (guessed or not self.fixed):
            if values.isfinite().all():
                self.fraction -= 16 + max(math.frexp(float(values.max()))[1] - 62, 0)
            else:  # a block's, or finite and beyond float32 in units of such a range: passes with gradients go on as before
                self.fraction = min(self.fraction, WIDE - 1)
        known = self.fixed.items() if several_processes() else ()
        self.fixed = {dtype: widened(fixed, 2 * HEADROOM) for dtype, fixed in known}

    def _outgrown(self, x: Tensor, fixed: FixedPoint) -> int:
        """By how many bits the range must grow where the input alone uses up the headroom, as far as that can be known without
        waiting for a device; else 0."""
        if x.device.type != "cpu" or not x.numel():
            return 0
        part = float(x.detach().abs().amax()) * 2.0**fixed.bits / fixed.limit
        return math.frexp(part)[1] + HEADROOM if 1 / 4 < part < math.inf else 0

    def _note(self, watch: Tensor, state: Momentum | Outcome) -> None:
        fixed = state.fixed
        if not (watch <= max(state.limits)).all():
            self.overflowed(watch, guessed=isinstance(fixed, Wide))
        elif fixed.dtype in self.fixed:
            now = self.fixed[fixed.dtype]
            self.fixed[fixed.dtype] = follow(now, *peaks(watch, fixed), state.recurrence.most_guard)
            warn_of_few_digits(float(watch[0, 1]), fixed)
