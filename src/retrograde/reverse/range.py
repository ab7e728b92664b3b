"""The range of the fixed point: how large the values of a pass may become, and how finely they are held.

A pass begins with the range that the passes before it have shown to be right, or, where there are none, with one made
for the magnitude of its input. Where a step would leave it, the step is undone, the integers are shifted to the
right, the bits shifted out are kept beside the state, and the step is taken again (`widening`). So no
value leaves the range, nothing is run twice, and the way back is as exact as ever.

That takes one look at the largest values after every step. On a CPU it costs nothing worth saving. On an accelerator
it would make the host wait, so there only the first pass does; later ones, with a few bits to spare, look once, where they
end, and are run again if a value has left the range (`again`). Where even that cannot be done, in a CUDA graph or with
collectives in the blocks, a deferred check tells it later (`deferred`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import Parameter

from ..arithmetic.fixed import INTEGERS, FixedPoint
from .calibrate import (
    MOST_GUARD,
    calibrated,
    check_channels,
    check_range,
    check_resolution,
    check_start,
    followed,
    wider,
)
from .cuda import capturing
from .deferred import FIRST_STEP, Deferred
from .extra import unusual
from .inputs import check_input, check_surroundings, refuse_meta

YIELDED = 6
"""Bits that evaluation gives up at most to hold what training had to."""


class PassRange:
    """The range of one pass, and the largest values it has seen.

    Args:
        x0: the input.
        fixed: the fixed point to begin with.
        rows: one for the start and one for each step.
        stepwise: whether to look after every step where that makes the host wait, on an accelerator: in a first pass, of which
            nothing is known yet, and where it is asked for.
        given: whether it was asked for by the user; then it is not widened.
        overflow: "raise" where a value is not finite (or, if `given`, out of range), "nan": let the output be NaN.
        waits: whether values are known only once the host has waited for them.

    Attributes:
        looks: whether there is a look after every step.
        looks_back: whether there is one look at all steps, where the pass ends (`again`).
        training, most_guard: of the pass, as its `Range` was told.
        restart: begins a range for the same pass once more, on x₀, with a look after every step.
        x, v: the largest values seen; start: that of x₀, as an integer.
        broken: a value was out of range or not finite, and is refused.
    """

    training: bool
    most_guard: int
    restart: Callable[[Tensor], PassRange]

    def __init__(
        self, x0: Tensor, fixed: FixedPoint, rows: int, *, stepwise: bool, given: bool, overflow: str, waits: bool
    ) -> None:  # fmt: skip
        self.dtype = x0.dtype
        self.given = given
        self.hold(fixed)
        self.raises = overflow == "raise"
        self.waits = waits
        has_values = type(x0) in (Tensor, Parameter) and not x0.is_meta
        can_wait = not waits or not (given or capturing(x0))
        self.looks = has_values and (not waits or (stepwise and can_wait))
        self.looks_back = has_values and can_wait and not self.looks
        # rows 16 bytes apart: aligned as kernels like it
        self.table = torch.zeros(rows, 4, dtype=fixed.work, device=x0.device)[:, :2]
        self.rows = self.table.unbind()
        self.x = 0.0
        self.v = 0.0
        self.start = 0.0
        self.broken = False

    def hold(self, fixed: FixedPoint) -> None:
        """Use this fixed point from now on. `limits` are of |v| and |x|, as integers; x must fit its float, too."""
        self.fixed = fixed
        largest = torch.finfo(self.dtype).max * 2.0**fixed.bits if fixed.bits < 900 else fixed.limit
        self.limits = fixed.limit, min(fixed.limit, largest)

    def fits(self, row: int, values: list[float] | None = None) -> bool:
        """Whether the values of this row are in range, as far as that is looked at now. `values`: where they were read already."""
        if not self.looks:
            return True
        v, x = self.rows[row].tolist() if values is None else values
        limit_v, limit_x = self.limits
        if not (v <= limit_v and x <= limit_x):
            return False
        self.x = max(self.x, x * self.fixed.unit)
        self.v = max(self.v, v * self.fixed.guarded_unit)
        if row == 0:
            self.start = x
        return True

    def look_back(self, table: list[list[float]]) -> bool:
        """Whether these first rows were in range. From now on, there is a look after every step."""
        self.looks = True
        self.looks_back = False
        return all(self.fits(row, values) for row, values in enumerate(table))

    def refuse(self, row: int, rows: int = 1) -> None:
        """Raise because of the values of these rows; or, if that was asked for, let the output be NaN."""
        self.broken = True
        if self.raises:
            check_range(self.table[row : row + rows].tolist(), self.fixed, self.limits, row)

    def or_nan(self, result: Tensor) -> Tensor:
        """The result; NaN where a value was out of range or not finite and nothing was raised."""
        if self.looks or (
            isinstance(self.table, FakeTensor) and self.table.device.type == "cpu"
        ):  # a real pass would look
            return result * float("nan") if self.broken and not self.raises else result
        limit_v, limit_x = self.limits
        v, x = self.table.unbind(1)
        good = (v <= limit_v).all() & (x <= limit_x).all()
        return result * torch.where(good, 1.0, float("nan")).to(result.dtype)


class Range:
    """The fixed point that the next pass begins with, by the integers that hold it and by training or evaluation.

    Args:
        setting: "auto"; "int16": 16-bit integers; or the `FixedPoint` to use always.
    """

    def __init__(self, setting: Any = "auto") -> None:
        if setting not in ("auto", "int16") and not isinstance(setting, FixedPoint):
            raise ValueError(
                f"fixed_point must be 'auto', 'int16' or a retrograde.FixedPoint(bits, dtype); got {setting!r}."
            )
        self.setting = setting
        self.narrow = setting == "int16" or (isinstance(setting, FixedPoint) and setting.dtype == torch.int16)
        self.found: dict[tuple[torch.dtype, bool], FixedPoint] = {}
        self.noted: dict[tuple[torch.dtype, bool], tuple[Any, ...]] = {}  # by which values which was found
        self.deferred = Deferred()
        self.looked = set[FixedPoint]()  # those in which the channels were looked at
        self.told = False  # whether that they are held coarsely was warned of: once

    @property
    def now(self) -> FixedPoint | str:
        """The fixed point in use, or the setting before the first pass."""
        if isinstance(self.setting, FixedPoint):
            return self.setting
        return next(iter(self.found.values()), self.setting)

    def begin(
        self, x0: Tensor, rows: int, *, training: bool, overflow: str, most_guard: int = MOST_GUARD, stepwise: bool = False,
    ) -> PassRange:  # fmt: skip
        """The range of a pass on x0. Raises here what an earlier pass on an accelerator turns out to have met.

        A pass begins here: what cannot be its input, and what it cannot be run under, is refused.

        Args:
            stepwise: look after every step, also where that makes the host wait.
        """
        usual = type(x0) is Tensor and x0.is_floating_point() and x0.layout is torch.strided and not x0.is_nested
        if not usual or unusual():
            check_input(x0)
            check_surroundings()
        if self.deferred.waiting or self.deferred.captured:
            self.deferred.collect(x0)
        if x0.is_meta and torch.is_grad_enabled():
            refuse_meta()
        if self.narrow and x0.dtype == torch.float64:
            raise ValueError("16-bit integers cannot hold a float64 network. Use fixed_point='auto'.")
        dtype = INTEGERS.get(x0.dtype, torch.int16 if self.narrow else torch.int32)
        waits = x0.device.type != "cpu" or self.deferred.event_on is not None
        given = isinstance(self.setting, FixedPoint)
        if given:
            known = fixed = replace(self.setting, dtype=dtype)
        else:
            known = self.found.get((dtype, True)) if training else self._known_in_evaluation(dtype)
            fixed = self._for_input(x0, known, dtype, most_guard, known is not None and waits and not stepwise)
        seen = PassRange(
            x0, fixed, rows, stepwise=stepwise or known is None, given=given, overflow=overflow, waits=waits
        )
        seen.training = training
        seen.most_guard = most_guard
        seen.restart = partial(
            self.begin, rows=rows, training=training, overflow=overflow, most_guard=most_guard, stepwise=True
        )
        if seen.looks and fixed not in self.looked and not self.told:
            self.looked.add(fixed)
            self.told = check_channels(x0, fixed, given)
        return seen

    def _for_input(
        self, x0: Tensor, known: FixedPoint | None, dtype: torch.dtype, most_guard: int, unseen: bool
    ) -> FixedPoint:  # fmt: skip
        """What is known, if it holds x0 or x0 is to stay unseen. Else v is taken to be an eighth of x0, as in most networks."""
        peak = 0.0
        if not x0.is_meta and type(x0) in (Tensor, Parameter) and x0.numel():
            if known is not None and unseen:
                return known
            if x0.is_cuda and capturing(x0):
                raise RuntimeError(FIRST_STEP)
            peak = float(x0.detach().abs().amax())
        if known is not None and not (math.isfinite(peak) and peak * 2.0**known.bits > known.limit / 4):
            return known
        peak = peak if math.isfinite(peak) else 1.0
        return calibrated(peak, peak / 8, dtype, most_guard)

    def _known_in_evaluation(self, dtype: torch.dtype) -> FixedPoint | None:
        """Wide enough for what training had to hold, as far as that costs few bits."""
        trained = self.found.get((dtype, True))
        own = self.found.get((dtype, False), trained)
        if own is None or trained is None:
            return own
        return wider(own, trained, 0 if dtype == torch.int16 else YIELDED)

    def learn(self, seen: PassRange) -> None:
        """Take note of the largest values of a finished pass."""
        if (seen.given and seen.looks) or seen.broken:
            return
        if seen.looks:
            self._note(seen)
        if seen.waits or not seen.looks:
            table, fetched = seen.table, copy.copy(seen)
            del fetched.table, fetched.rows, fetched.restart  # a check keeps no memory on the device
            (self.deferred.prepare if seen.looks else self.deferred.tell)(table, partial(self._judge, fetched))

    def _judge(self, seen: PassRange, table: Tensor, when: str) -> None:
        """`learn` of a pass on an accelerator, once its values have arrived."""
        rows = table.tolist()
        seen.x = seen.v = 0.0  # of this table alone: replays of a CUDA graph come here again and again
        if not seen.look_back(rows):
            self.found.pop((seen.fixed.dtype, seen.training), None)  # the next pass looks again
            self.noted.pop((seen.fixed.dtype, seen.training), None)
            if seen.raises:
                check_range(rows, seen.fixed, seen.limits)
        elif not seen.given:
            self._note(seen)

    def _note(self, seen: PassRange) -> None:
        """Follow the largest values with the range of the next pass, where their magnitudes are not those of the pass before."""
        used, x, v, start, most_guard = seen.fixed, seen.x, seen.v, seen.start, seen.most_guard
        key = used.dtype, seen.training
        values = (used, most_guard, *[math.frexp(largest)[1] if largest else None for largest in (x, v, start)])
        if self.noted.get(key) == (values, self.found.get(key)):
            return
        check_resolution(x, calibrated(x, v, used.dtype, most_guard))
        fixed = followed(used, x, v, most_guard)
        self.found[key] = fixed
        check_start(start, fixed)
        self.noted[key] = values, fixed


def holders(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parts of a network that keep their state in fixed point, by name; each has a `range`."""
    for name, module in net.named_modules():
        hidden = module.__dict__.get("momentum")  # a MomentumStage keeps its network out of the module tree
        for part in (module, hidden):
            if isinstance(getattr(part, "range", None), Range):
                yield name, part
