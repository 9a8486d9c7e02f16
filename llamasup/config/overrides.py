"""What a Python program says of a model → a ModelEntry, checked as what a config says is."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from llamasup.config.issues import shown
from llamasup.config.keys import FilePath, Key, Many
from llamasup.config.kinds import Boolean, Integer, IntegerOr, InvalidValue, Time
from llamasup.config.reading import keys_of
from llamasup.config.values import ModelEntry
from llamasup.errors import UsageInvalid

__all__ = ["Source", "model_entry"]

Source = Literal["path", "repo", "url"]
_SOURCES = ("path", "repo", "url")


def model_entry(source: Source, place: str, given: Mapping[str, Any]) -> ModelEntry:
    """The model at ``place``, with what is ``given`` of it; None says nothing. Times are in seconds.

    Raises UsageInvalid with everything that cannot be meant.
    """
    keys = _keys()
    taken: dict[str, Any] = {}
    issues: list[str] = []
    for name, value in given.items():
        if name not in keys:
            issues.append(f"{name}: a model has no such option{_near(name, keys)}")
        elif value is not None:
            kind = keys[name].kind
            try:
                taken[name] = _taken(value, kind)
            except InvalidValue as refused:
                why = f" ({refused.why})" if refused.why else ""
                issues.append(f"{name}={shown(repr(value))[1:-1]}: it takes {_allowed(kind)}{why}")
    if issues:
        raise UsageInvalid(
            f"{issues[0]}." if len(issues) == 1 else f"{len(issues)} options cannot be meant.",
            remedy="docs/configuration.md says what each option means.",
            details=tuple(issues) if len(issues) > 1 else (),
        )
    return ModelEntry(**{**taken, source: place})


@cache
def _keys() -> Mapping[str, Key]:
    """By field. Where the model is, is not said by an option."""
    return {field: key for field, key in keys_of(ModelEntry).values() if field not in _SOURCES}


def _near(name: str, keys: Iterable[str]) -> str:
    near = [f"{name}_s"] if f"{name}_s" in keys else difflib.get_close_matches(name[:64], keys, n=1)
    return f"; the nearest is {near[0]}" if near else f"; there are {', '.join(keys)}"


def _taken(value: Any, kind: Any) -> Any:
    """Raises InvalidValue."""
    match kind:
        case Many(one, or_one):
            if or_one and isinstance(value, str | PathLike):
                value = (value,)
            if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
                raise InvalidValue
            return tuple(_taken(each, one) for each in value)
        case FilePath(literal=words):
            return value if value in words else _path(value)
        case Time():
            return _seconds(value, kind)
        case Boolean():
            if not isinstance(value, bool):
                raise InvalidValue
            return value
        case Integer():
            return kind.parse(_whole(value))
        case IntegerOr():
            return kind.parse(value if isinstance(value, str) else _whole(value))
        case _:
            if not isinstance(value, str):
                raise InvalidValue
            return kind.parse(value)


def _whole(value: Any) -> str:
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
        case FilePath(what):
            return what
        case Time(never=never):
            return "seconds, 0 or more" + (", or inf for never" if never else "")
        case Boolean():
            return "True or False"
        case _:
            return str(kind.allowed)
