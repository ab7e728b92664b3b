"""The one error a run reports: what was found, what is allowed, what to do. The command line prints it and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ExperimentError(RuntimeError):
    """A run that cannot start or cannot go on. What was finished before it is untouched."""


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """`Did you mean …?` for a misspelt name, and the names there are.

    >>> suggestion("lsita", ["rings", "lista"])
    "Did you mean 'lista'? There are: rings, lista."
    """
    names = list(allowed)
    near = get_close_matches(given, names, n=1, cutoff=0.5)
    question = f"Did you mean {near[0]!r}? " if near else ""
    return f"{question}There are: {', '.join(names)}."
