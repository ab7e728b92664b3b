"""What one momentum network computes, apart from its blocks: γ of each layer, and what the blocks give (its form).

"branch"   f(x)
"block"    x + f(x)
"relu"     f(x), of a network x ← relu(x + f(x)); so the f of a step is relu(x + f(x)) − x
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..arithmetic.buffers import buffers, straddles
from ..arithmetic.ratio import as_ratio, as_ratios, gain
from .calibrate import MOST_GUARD

FORMS = ("branch", "block", "relu")
"""By number in the kernels."""


@dataclass(frozen=True)
class RandomSign:
    """γ of random sign, to be given as `gamma`: +γ or −γ for each sample of each block in training, the plain network in evaluation.

    Args:
        gamma: its magnitude, between 0 and 1; one for all blocks, or one each.

    >>> RandomSign(1 / 16)
    RandomSign(1/16)

    Raises:
        ValueError: not between 0 and 1.
    """

    gamma: Any

    def __post_init__(self) -> None:
        given = self.gamma.tolist() if isinstance(self.gamma, Tensor) else self.gamma
        several = isinstance(given, Iterable) and not isinstance(given, str)
        ratios = tuple(map(as_ratio, given)) if several else as_ratio(given)
        if not all(0 < ratio < 1 for ratio in (ratios if isinstance(ratios, tuple) else (ratios,))):
            raise ValueError(
                f"RandomSign takes magnitudes between 0 and 1; got {self.gamma!r}. gamma=0 is the plain network, and at 1 half of "
                "all samples would not see f at all. Try 1/16."
            )
        object.__setattr__(self, "gamma", ratios)

    def __repr__(self) -> str:
        several = isinstance(self.gamma, tuple)
        return f"RandomSign([{', '.join(map(str, self.gamma))}])" if several else f"RandomSign({self.gamma})"


def magnitude(gamma: Any) -> Any:
    """`gamma` without its random sign, if it has one."""
    return gamma.gamma if isinstance(gamma, RandomSign) else gamma


@dataclass(frozen=True)
class Recurrence:
    """What one momentum network computes, apart from its blocks."""

    gammas: tuple[Fraction, ...]
    form: str
    narrow: bool = False  # x and v are held in 16 bits
    signed: bool = False  # γ is of random sign: see `sign`

    def __str__(self) -> str:
        ratios = self.gammas
        gamma = str(ratios[0]) if len(set(ratios)) == 1 else f"{min(ratios)}…{max(ratios)}"
        gamma = f"RandomSign({gamma})" if self.signed else gamma
        return f"depth={len(ratios)}, gamma={gamma}, form={self.form!r}"

    def __reduce__(self) -> Any:
        return Recurrence, (self.gammas, self.form, self.narrow, self.signed)

    @cached_property
    def factors(self) -> list[tuple[int, int, float, float]]:
        """n, d, γ and the factor on f, layer by layer. With a random sign f comes with its factor."""
        return [(g.numerator, g.denominator, float(g), 1.0 if self.signed else float(gain(g))) for g in self.gammas]

    @cached_property
    def carried(self) -> list[tuple[float, float, float]]:
        """In units of gy of layer k: gv before it; gx where gv after it was 0; the same where a relu passed its input.

        The entry after the last is for v's own gradient.
        """
        less = self.form != "branch"
        units = [
            (gamma / factor, (1 - factor if less else 1.0) / factor, 1 / factor) for *_, gamma, factor in self.factors
        ]
        return [*units, (1.0, 0.0, 0.0)]

    @cached_property
    def most_guard(self) -> int:
        """How many guard digits v may have: v is at most Σ gain times the largest f, so near γ = 1 it is smaller still."""
        reach = min(1.0, sum(factor for *_, factor in self.factors))
        return MOST_GUARD + math.ceil(math.log2(1 / reach)) if reach else MOST_GUARD

    @cached_property
    def plain(self) -> bool:
        """Whether a step is that of a plain residual network (γ = 0): it forgets v and cannot be undone."""
        return 0 in self.gammas

    @cached_property
    def residual(self) -> bool:
        """Whether all steps are: then the network is run as such (`residual.Residual`)."""
        return not any(self.gammas)

    @cached_property
    def in_evaluation(self) -> Recurrence:
        """What the network computes in evaluation: the plain one, if signs are random."""
        return replace(self, gammas=(Fraction(0),) * len(self.gammas), signed=False) if self.signed else self

    @cached_property
    def plans(self) -> dict[Any, Any]:
        """Memory plans worked out for it, by the dtype of the input and the memory mode (`memory.modes`)."""
        return {}

    @cached_property
    def begins(self) -> dict[int, torch.dtype | None]:
        """Where the information buffers begin, and their dtypes."""
        return buffers(self.gammas)

    @cached_property
    def places(self) -> list[tuple[int, torch.dtype | None, int]]:
        """By step: where its information buffer begins, its dtype, and how many bits of the step go to the buffer before."""
        begins, shared, found, begin = self.begins, straddles(self.gammas), [], 0
        for k in range(len(self.gammas)):
            begin = k if k in begins else begin
            found.append((begin, begins[begin], shared.get(k, 0)))
        return found


def recurrence_of(gamma: Any, depth: int, form: str, narrow: bool) -> Recurrence:
    """What a network computes whose `gamma` is this."""
    return Recurrence(as_ratios(magnitude(gamma), depth), form, narrow, isinstance(gamma, RandomSign))


def gamma_of(recurrence: Recurrence) -> Any:
    """γ as a ratio, or one ratio per block where they differ; a `RandomSign` of that."""
    ratios = recurrence.gammas
    gamma: Fraction | tuple[Fraction, ...] = ratios[0] if len(set(ratios)) == 1 else ratios
    return RandomSign(gamma) if recurrence.signed else gamma


def check_reversible(memory: str, recurrence: Recurrence) -> None:
    """Raise where a memory mode asks for what γ = 0 does not allow."""
    if memory == "reverse" and recurrence.plain:
        raise ValueError(
            "gamma = 0 (and RandomSign in evaluation: call .train() first) is a plain residual network, which cannot be run in "
            "reverse: its step forgets v. Use memory='checkpoint', 'store' or 'auto', or a gamma above 0."
        )
