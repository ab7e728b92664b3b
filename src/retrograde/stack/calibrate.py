"""The fixed-point range of a network: calibrated on its first batch, then kept in step with its activations.

After every pass the largest |x| and |v| seen are compared with the range (`follow`). On an accelerator they are fetched
without waiting, so the range follows a step or two later; the headroom is there for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ..core.fixedpoint import FixedPoint, calibrated, follow, integer_dtype
from .momentum import Momentum, Outcome, Recurrence, check_range


def peaks(watch: Tensor, fixed: FixedPoint) -> tuple[float, float]:
    """The largest |x| and |v| of a pass, as floats of the network."""
    v, x = watch.nan_to_num(0.0, 0.0).amax(0).tolist()
    return x * 2.0**-fixed.bits, v * 2.0 ** -(fixed.bits + fixed.guard)


def wide(x0: Tensor, recurrence: Recurrence) -> FixedPoint:
    """A fixed point 2^45 times as wide as the input, for a pass of which nothing is known yet."""
    peak = float(x0.detach().abs().amax()) if x0.numel() else 0.0
    finest = min(factor for *_, factor in recurrence.factors)  # of the factors on f
    guard = 2 + math.ceil(-math.log2(finest))
    return FixedPoint(16 - math.frexp(peak)[1] if math.isfinite(peak) else 0, torch.int64, guard)


class Range:
    """The fixed point in use, by the integer dtype it is for."""

    def __init__(self, setting: Any) -> None:
        if setting != "auto" and (
            isinstance(setting, bool) or not isinstance(setting, Integral) or not -64 <= int(setting) <= 96
        ):
            raise ValueError(f"fraction_bits must be 'auto' or a whole number from -64 to 96; got {setting!r}.")
        self.setting: int | str = setting if setting == "auto" else int(setting)
        self.fixed: dict[torch.dtype, FixedPoint] = {}
        self.pending: list[tuple[Tensor, Any, Outcome]] = []

    def for_input(self, x: Tensor, most_guard: int, survey: Callable[[], tuple[float, float]]) -> FixedPoint:
        """The fixed point for this pass. Raises here what an earlier pass on an accelerator turns out to have met.

        Args:
            most_guard: guard digits at most.
            survey: finds the largest |x| and the largest |v| of a pass; called where there is none to go by.
        """
        return self.current(x) or self.calibrate(x, *survey(), most_guard)

    def current(self, x: Tensor) -> FixedPoint | None:
        """The fixed point for this input, if there is anything to go by. Raises as `for_input` does."""
        while self.pending and self.pending[0][1].query():
            watch, _, state = self.pending.pop(0)
            self._note(watch, state)
            if state.raises:
                check_range(watch.tolist(), state.fixed, state.limits)
        dtype = integer_dtype(x.dtype)
        if isinstance(self.setting, int):
            return FixedPoint(self.setting, dtype)
        fixed = self.fixed.get(dtype)
        return None if fixed is None or self._outgrown(x, fixed) else fixed

    def calibrate(self, x: Tensor, peak_x: float, peak_v: float, most_guard: int) -> FixedPoint:
        """The fixed point for inputs like this one, now that the largest values of a pass are known."""
        dtype = integer_dtype(x.dtype)
        fixed = self.fixed[dtype] = calibrated(peak_x, peak_v, dtype, most_guard)
        return fixed

    def seen(self, state: Momentum) -> None:
        """Take note of the largest values of a finished pass."""
        if state.watch.device.type == "cpu":
            self._note(state.watch, state)
            return
        event = torch.get_device_module(state.watch.device).Event()
        self.pending.append((state.watch.to("cpu", non_blocking=True), event, state.outcome()))
        event.record()

    def _outgrown(self, x: Tensor, fixed: FixedPoint) -> bool:
        """Whether the input alone uses up the headroom, where that can be known without waiting for a device."""
        if x.device.type != "cpu" or not x.numel():
            return False
        peak = float(x.detach().abs().amax())
        return fixed.limit / 4 < peak * 2.0**fixed.bits < math.inf

    def _note(self, watch: Tensor, state: Momentum | Outcome) -> None:
        fixed = state.fixed
        if not (watch <= fixed.limit).all():
            self.fixed.pop(fixed.dtype, None)  # calibrate anew at the next pass
        elif fixed.dtype in self.fixed:
            now = self.fixed[fixed.dtype]
            self.fixed[fixed.dtype] = follow(now, *peaks(watch, fixed), state.recurrence.most_guard)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": []}
