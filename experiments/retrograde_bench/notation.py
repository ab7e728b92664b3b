"""How a method is written: a name, and options where they are not the default.

plain                                              a baseline
checkpoint[step=graph]                             a baseline, its whole step replayed from a CUDA graph
ours[memory=reverse]
ours[memory=reverse,form=relu,fixed_point=int16]
ours[memory=0.6*checkpoint,by=convert]             given 0.6 of the peak that `checkpoint` was measured to have
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

MODES = ("reverse", "checkpoint", "store", "auto")
_SHARE = re.compile(r"(\d*\.?\d+)\*(plain|checkpoint)")
_WRITTEN = re.compile(r"([\w-]+)(?:\[(.*)\])?")


@dataclass(frozen=True)
class Ours:
    """A momentum network, described.

    Attributes:
        memory: a mode, or a budget as a share of what a baseline takes: "0.6*checkpoint".
        form: what a block computes: "block" x + f(x), "branch" f(x), "relu" f(x) of relu(x + f(x)).
        fixed_point: "auto"; "int16" for x and v in 16 bits; "given" for 16 bits after the point, so that no range is looked at.
        verify: "auto", "strict" or "off".
        gamma: of all blocks; "" for the run's.
        by: "net" for one `MomentumNet` a stage, "convert" for `rg.convert` of the whole network.
        blocks: "eager" or "compiled".
        step: "eager", or "graph" to replay the whole step from a CUDA graph.
    """

    memory: str = "auto"
    form: str = "block"
    fixed_point: str = "auto"
    verify: str = "auto"
    gamma: str = ""
    by: str = "net"
    blocks: str = "eager"
    step: str = "eager"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}.")
        if self.memory not in MODES and not _SHARE.fullmatch(self.memory):
            raise ValueError(
                f"memory must be one of {', '.join(MODES)} or a share as 0.6*checkpoint or 0.1*plain; got {self.memory!r}."
            )
        if self.gamma:
            float(self.gamma)

    @property
    def share(self) -> tuple[float, str] | None:
        """A budget: so much of the peak of this baseline.

        >>> Ours("0.6*checkpoint").share
        (0.6, 'checkpoint')
        """
        found = _SHARE.fullmatch(self.memory)
        return (float(found[1]), found[2]) if found else None

    def __str__(self) -> str:
        """The options that are not the default, and `memory`.

        >>> str(Ours(memory="reverse", form="relu"))
        'ours[memory=reverse,form=relu]'
        """
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        told = [
            f"{name}={value}" for name, value in options.items() if name == "memory" or value != getattr(_DEFAULT, name)
        ]
        return f"ours[{','.join(told)}]"


_ALLOWED = {
    "form": ("block", "branch", "relu"),
    "fixed_point": ("auto", "int16", "given"),
    "verify": ("auto", "strict", "off"),
    "by": ("net", "convert"),
    "blocks": ("eager", "compiled"),
    "step": ("eager", "graph"),
}
_DEFAULT = Ours()


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """The name and the options as written.

    >>> parsed("ours[memory=reverse,form=relu]")
    ('ours', {'memory': 'reverse', 'form': 'relu'})

    Raises:
        ValueError: for anything of another form.
    """
    found = _WRITTEN.fullmatch(text.strip())
    pairs = [pair.split("=") for pair in (found[2] or "").split(",") if pair] if found else []
    if found is None or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"a method is a name, or name[option=value,...]; got {text!r}.")
    return found[1], {name.strip(): value.strip() for name, value in pairs}


def described(options: dict[str, str]) -> Ours:
    """`Ours` with these options.

    Raises:
        ValueError: for an option or a value that there is not.
    """
    names = [f.name for f in fields(Ours)]
    wrong = [name for name in options if name not in names]
    if wrong:
        raise ValueError(f"ours has no option {wrong[0]!r}. There are: {', '.join(names)}.")
    given: dict[str, Any] = dict(options)
    return Ours(**given)


def separated(texts: Iterable[str]) -> list[str]:
    """Methods that were written together with commas, one by one.

    >>> separated(["plain,ours[memory=reverse,form=relu]", "checkpoint"])
    ['plain', 'ours[memory=reverse,form=relu]', 'checkpoint']
    """
    return [part.strip() for text in texts for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
