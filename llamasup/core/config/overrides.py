"""Checks a model's settings from a Python program like a config's, and makes a ModelEntry of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from llamasup.core.config.issues import shown
from llamasup.core.settings.declaration import Setting, settings_of
from llamasup.core.settings.kinds import Boolean, FilePath, Integer, IntegerOr, InvalidValue, Many, Time
from llamasup.core.settings.model import ModelEntry
from llamasup.core.system.text import did_you_mean
from llamasup.errors import UsageInvalid

Source = Literal["path", "repo", "url"]
_SOURCES = ("path", "repo", "url")


def model_entry(source: Source, location: str, options: Mapping[str, Any]) -> ModelEntry:
    """Make the model from ``location`` (a path, repository or URL); an option of None is unset.

    Times are in seconds. Raises UsageInvalid with all invalid options.
    """
    keys = _keys()
    checked: dict[str, Any] = {}
    issues: list[str] = []
    for name, value in options.items():
        if name not in keys:
            issues.append(f"{name}: unknown option ({_similar(name, keys)})")
        elif value is not None:
            kind = keys[name].kind
            try:
                checked[name] = _checked(value, kind)
            except InvalidValue as invalid:
                why = f" ({invalid.why})" if invalid.why else ""
                issues.append(
                    f"{name}: invalid value {shown(repr(value))[1:-1]}{why}; expected {_allowed(kind)}"
                )
    if issues:
        raise UsageInvalid(
            f"{issues[0]}." if len(issues) == 1 else f"{len(issues)} invalid options:",
            remedy="docs/configuration.md describes each option.",
            details=tuple(issues) if len(issues) > 1 else (),
        )
    return ModelEntry(**{**checked, source: location})


@cache
def _keys() -> Mapping[str, Setting]:
    """The options by field; the model's location is not an option."""
    return {field: setting for field, setting in settings_of(ModelEntry).values() if field not in _SOURCES}


def _similar(name: str, keys: Iterable[str]) -> str:
    if f"{name}_s" in keys:
        return f"did you mean {name}_s?"
    return did_you_mean(name, keys) or f"valid options: {', '.join(keys)}"


def _checked(value: Any, kind: Any) -> Any:
    """Check one value. Raises InvalidValue."""
    match kind:
        case Many(one, or_one):
            if or_one and isinstance(value, str | PathLike):
                value = (value,)
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
                raise InvalidValue
            values = tuple(_checked(item, one) for item in value)
            if repeated := kind.duplicates(values):
                raise InvalidValue(f"{values[repeated[0]]!r} occurs twice")
            return values
        case FilePath(literal=literal):
            return value if value in literal else _path(value)
        case Time():
            return _seconds(value, kind)
        case Boolean():
            if not isinstance(value, bool):
                raise InvalidValue
            return value
        case Integer():
            return kind.parse(_integer(value))
        case IntegerOr():
            return kind.parse(value if isinstance(value, str) else _integer(value))
        case _:
            if not isinstance(value, str):
                raise InvalidValue
            return kind.parse(value)


def _integer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidValue
    return str(int(value))


def _seconds(value: Any, kind: Time) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidValue
    seconds = float(value)
    if not seconds >= 0 or (math.isinf(seconds) and not kind.never):
        raise InvalidValue
    return seconds


def _path(value: Any) -> str:
    if not isinstance(value, str | PathLike):
        raise InvalidValue
    path = Path(value)
    if not str(value) or "\0" in str(value):
        raise InvalidValue
    try:
        return str(path.expanduser().absolute())
    except (RuntimeError, OSError) as error:
        raise InvalidValue(str(error)) from None


def _allowed(kind: Any) -> str:
    match kind:
        case Many(one):
            return f"a list, each {_allowed(one)}"
        case Time(never=never):
            return "seconds, 0 or more" + (", or inf for never" if never else "")
        case Boolean():
            return "True or False"
        case _:
            return str(kind.allowed)
