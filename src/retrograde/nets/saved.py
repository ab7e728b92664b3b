"""γ in a `state_dict`: weights say of which network they are.

    net.state_dict()._metadata[""]["retrograde"]        {"gamma": "9/10", "form": "branch", "velocity": None}

Keys and tensors stay as they are. `torch.save` keeps the metadata, and `torch.load` returns it, with weights_only=True too. What holds
tensors alone (safetensors, a dictionary made of another) loses it, and then nothing is compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..reverse.recurrence import RandomSign, magnitude

KEY = "retrograde"


def written(gamma: Any) -> str | list[str]:
    """γ, as `gamma_of` gives it, as text: "1/8", or one per step where they differ; "±1/8" where signs are random."""
    sign = "±" if isinstance(gamma, RandomSign) else ""
    ratios = magnitude(gamma)
    return [f"{sign}{ratio}" for ratio in ratios] if isinstance(ratios, tuple) else f"{sign}{ratios}"


def read(gamma: str | Sequence[str]) -> Any:
    """γ from text.

    >>> read(written(Fraction(1, 8))), read(written((Fraction(1, 8), Fraction(0)))), read(written(RandomSign(1 / 16)))
    (Fraction(1, 8), (Fraction(1, 8), Fraction(0, 1)), RandomSign(1/16))
    """
    given = [gamma] if isinstance(gamma, str) else gamma
    ratios = tuple(Fraction(ratio.removeprefix("±")) for ratio in given)
    found = ratios[0] if isinstance(gamma, str) else ratios
    return RandomSign(found) if given[0].startswith("±") else found


def put(destination: Any, prefix: str, described: dict[str, Any]) -> None:
    """Note in a `state_dict` in the making what the module of this prefix computes. Of a plain network, γ = 0, nothing is noted."""
    metadata = getattr(destination, "_metadata", None)
    gamma = described["gamma"]
    if metadata is not None and any(each != "0" for each in ([gamma] if isinstance(gamma, str) else gamma)):
        metadata.setdefault(prefix[:-1], {})[KEY] = described


def compare(name: str, local_metadata: dict[str, Any], described: dict[str, Any], advice: str) -> bool:
    """Warn if weights that are loaded are known to be of another network; whether they are."""
    saved = local_metadata.get(KEY)
    if not isinstance(saved, dict):
        return False
    other = [key for key in {**described, **saved} if key != "stage" and saved.get(key) != described.get(key)]
    if other:
        here, there = (", ".join(f"{key} = {_shown(of.get(key))}" for key in other) for of in (described, saved))
        warnings.warn(
            f"the weights loaded into {name} are of another network: they were saved with {there}, and it has {here}. Its outputs are "
            f"not those of the network that was saved. {advice}",
            stacklevel=2,
        )
    return bool(other)


class Described:
    """A module that notes in its `state_dict` what it computes, and warns where weights of another network are loaded."""

    @property
    def described(self) -> dict[str, Any]:
        """What it computes."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        put(destination, prefix, self.described)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)  # type: ignore[misc]
        self.compare(prefix, local_metadata)

    def compare(self, prefix: str, local_metadata: dict[str, Any]) -> None:
        """Warn if weights that are loaded are known to be of another network."""
        advice = "Set net.gamma, if that is all; if the change is meant, load dict(state_dict), which does not say."
        compare(f"{type(self).__name__} {prefix[:-1]!r}", local_metadata, self.described, advice)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list | tuple) else str(value)
