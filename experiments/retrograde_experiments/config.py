"""Configs: frozen dataclasses with three presets, changed by `key=value`, stored as JSON.

    smoke      seconds, for the tests
    default    minutes; `setting()` says what it leaves out
    paper      the paper's setting

Values are int, float, str, bool, any of these or None, or a tuple of them: `--set depths=1,2,5`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import ExperimentError, suggestion

if TYPE_CHECKING:
    from typing_extensions import Self

PRESETS = ("smoke", "default", "paper")


@dataclass(frozen=True)
class Settings:
    """What every experiment's config derives from. A config without arguments is the paper's."""

    decisive: ClassVar[tuple[str, ...]] = ()
    """Settings in which a run must agree with the paper's to reproduce or to contradict it; else it shows its claims in part."""

    @classmethod
    def paper(cls) -> Self:
        """The paper's setting."""
        return cls()

    @classmethod
    def default(cls) -> Self:
        """Minutes; `setting()` says what it leaves out."""
        return cls()

    def setting(self) -> str:
        """The setting in a sentence, for the report: sizes, repeats, and what differs from the paper's."""
        raise NotImplementedError

    def departs(self) -> list[str]:
        """The decisive settings that are not the paper's."""
        paper = type(self).paper()
        return [name for name in self.decisive if getattr(self, name) != getattr(paper, name)]


def preset(kind: type[Any], name: str) -> Any:
    """The config of that name."""
    if name not in PRESETS:
        raise ExperimentError(f"there is no preset {name!r}. {suggestion(name, PRESETS)}")
    return getattr(kind, name)()


def override(config: Any, assignments: Iterable[str]) -> Any:
    """The config with some values changed, each given as `key=value`.

    Raises:
        ExperimentError: for an unknown key, a value that does not fit, or a config that refuses it.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ExperimentError(f"a setting is given as key=value; got {assignment!r}.")
        changes[key.strip()] = _parse(_type_of(type(config), key.strip()), text.strip(), key.strip())
    return _checked(lambda: dataclasses.replace(config, **changes))


def to_json(config: Any) -> dict[str, Any]:
    """The values as JSON holds them."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_json(kind: type[Any], values: dict[str, Any]) -> Any:
    """The inverse of `to_json`. Keys that are missing keep their default."""
    if not isinstance(values, dict):
        raise ExperimentError(f"a config gives each setting its value; got a {type(values).__name__}.")
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    if nested:
        raise ExperimentError(f"{nested[0]} takes a value or a list of values; got {values[nested[0]]!r}.")
    read = {key: _tupled(_type_of(kind, key), value) for key, value in values.items()}
    return _checked(lambda: kind(**read))


def _type_of(kind: type[Any], key: str) -> Any:
    names = [field.name for field in dataclasses.fields(kind)]
    if key not in names:
        raise ExperimentError(f"there is no setting {key!r}. {suggestion(key, names)}")
    return typing.get_type_hints(kind)[key]


def _checked(make: Any) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"this setting is refused: {error}") from error


def _parse(hint: Any, text: str, key: str) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if type(None) in options and text.lower() in ("none", ""):
            return None
        hint = next(option for option in options if option is not type(None))
    if typing.get_origin(hint) is tuple:
        return tuple(_parse(typing.get_args(hint)[0], part.strip(), key) for part in text.split(",") if part.strip())
    try:
        return _truth(text) if hint is bool else hint(text)
    except ValueError:
        raise ExperimentError(f"{key} takes {_NAMES.get(hint, hint.__name__)}; got {text!r}.") from None


_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "yes", "1")


def _plain(value: Any) -> Any:
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value


def _tupled(hint: Any, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    inner = typing.get_args(hint)
    return tuple(_tupled(inner[0] if inner else None, part) for part in value)
