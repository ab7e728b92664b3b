"""The fixed-point range of a network: calibrated on its first batch, then kept in step with its activations.

After every pass the largest |x| and |v| seen are compared with the range (`follow`). On an accelerator they are fetched
without waiting, so the range follows a step or two later; the headroom is there for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.fixedpoint import FixedPoint, calibrated, follow, integer_dtype
from .momentum import Momentum, check_range


def peaks(watch: Tensor, fixed: FixedPoint) -> tuple[float, float]:
    """The largest |x| and |v| of a pass, as floats of the network."""
    v, x = watch.nan_to_num(0.0, 0.0).amax(0).tolist()
    return x * 2.0**-fixed.bits, v * 2.0 ** -(fixed.bits + fixed.guard)


class Range:
    """The fixed point in use, by the integer dtype it is for."""

    def __init__(self, setting: int | str) -> None:
        if setting != "auto" and (
            isinstance(setting, bool) or not isinstance(setting, int) or not -64 <= setting <= 96
        ):
            raise ValueError(f"fraction_bits must be 'auto' or a whole number from -64 to 96; got {setting!r}.")
        self.setting = setting
        self.fixed: dict[torch.dtype, FixedPoint] = {}
        self.pending: list[tuple[Tensor, Any, FixedPoint]] = []

    def for_input(self, x: Tensor, survey: Callable[[], tuple[float, float]]) -> FixedPoint:
        """The fixed point for this pass. Raises here what an earlier pass on an accelerator turns out to have met.

        Args:
            survey: finds the largest |x| and the largest |v| of a pass; called where there is none to go by.
        """
        while self.pending and self.pending[0][1].query():
            watch, _, fixed = self.pending.pop(0)
            self._note(watch, fixed)
            check_range(watch.tolist(), fixed)
        dtype = integer_dtype(x.dtype)
        if isinstance(self.setting, int):
            return FixedPoint(self.setting, dtype)
        if dtype not in self.fixed:
            self.fixed[dtype] = calibrated(*survey(), dtype)
        return self.fixed[dtype]

    def seen(self, state: Momentum, raises: bool) -> None:
        """Take note of the largest values of a finished pass."""
        if state.watch.device.type == "cpu":
            self._note(state.watch, state.fixed)
            return
        event = torch.get_device_module(state.watch.device).Event()
        watch = state.watch if raises else state.watch.nan_to_num(0.0, 0.0).clamp_max(state.fixed.limit)
        self.pending.append((watch.to("cpu", non_blocking=True), event, state.fixed))
        event.record()

    def _note(self, watch: Tensor, fixed: FixedPoint) -> None:
        if not (watch <= fixed.limit).all():
            self.fixed.pop(fixed.dtype, None)  # calibrate anew at the next pass
        elif fixed.dtype in self.fixed:
            self.fixed[fixed.dtype] = follow(self.fixed[fixed.dtype], *peaks(watch, fixed))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "pending": []}
