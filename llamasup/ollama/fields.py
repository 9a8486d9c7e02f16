"""Reads the fields of a request in Ollama's API, and says what is wrong with one (pure).

``null`` counts as a field that is not there, as in Ollama. A field that Ollama's API does not have is
ignored, as Ollama does; a field that it has is honoured or refused (docs/ollama.md has the table).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from llamasup.http.heads import HttpError

__all__ = [
    "MAX_NUMBER",
    "Refused",
    "boolean",
    "decoded",
    "integer",
    "items",
    "keep_alive",
    "number",
    "object_of",
    "refusal",
    "text",
]

MAX_NUMBER: Final = (1 << 31) - 1
"""The largest whole number of an option: llama-server reads 32 bits."""

_FOREVER: Final = float("inf")
_MAX_SHOWN: Final = 60  # letters of a value in a message


class Refused(Exception):
    """The request cannot be served as it is."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error

    def within(self, place: str) -> Refused:
        """The same, of a field of an item."""
        return Refused(replace(self.error, message=f"{place}: {self.error.message}"))


def refusal(message: str, remedy: str = "", *, status: int = 400) -> Refused:
    return Refused(HttpError(status, message, cause="ollama_field", remedy=remedy))


def decoded(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body. Raises Refused."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The text names the place, and no value.
        raise refusal(f"the body is not JSON: {str(error)[:_MAX_SHOWN]}", "send a JSON object") from None
    if not isinstance(fields, dict):
        raise refusal(f"the body is {_kind(fields)}", "send a JSON object")
    return fields


def text(fields: Mapping[str, Any], name: str, default: str = "") -> str:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def boolean(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def integer(
    fields: Mapping[str, Any], name: str, least: int = -MAX_NUMBER, most: int = MAX_NUMBER
) -> int | None:
    """A whole number; some clients write 5 as 5.0."""
    value = number(fields, name)
    if value is None:
        return None
    if value != int(value):
        raise _wrong(name, fields[name], "a whole number")
    if not least <= value <= most:
        raise refusal(f"{name} is {_shown(fields[name])}", f"use {least} to {most}")
    return int(value)


def number(fields: Mapping[str, Any], name: str) -> float | int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, value, "a number")
    if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 1 << 63):
        raise refusal(f"{name} is {_shown(value)}", "use a smaller number")
    return value


def object_of(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def items(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong(name, value, "an array")
    return value


# --- durations -------------------------------------------------------------------------------------

_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = r"(\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})(ns|us|µs|ms|s|m|h)"
_parts_in = re.compile(_PART).finditer
_is_duration = re.compile(rf"([+-]?)(0|(?:{_PART})+)").fullmatch


def keep_alive(fields: Mapping[str, Any]) -> float | None:
    """Seconds; None if the request does not say it. A negative time is for ever, as in Ollama."""
    value = fields.get("keep_alive")
    if value is None:
        return None
    if isinstance(value, str):
        found = _is_duration(value.strip())
        if found is None:
            raise refusal(
                f"keep_alive is {_shown(value)}", "use seconds, or a text such as 5m, 1h30m, 0 or -1m"
            )
        seconds = sum(float(part[1]) * _UNITS_S[part[2]] for part in _parts_in(found[2]))
        return _FOREVER if found[1] == "-" and seconds else seconds
    seconds = number(fields, "keep_alive") or 0.0
    return _FOREVER if seconds < 0 else float(seconds)


# --- messages --------------------------------------------------------------------------------------


def _wrong(name: str, value: object, expected: str) -> Refused:
    return refusal(f"{name} is {_kind(value)}", f"use {expected}")


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {_shown(value)}"
        case str():
            return f"the string {_shown(value)}"
        case list():
            return "an array"
        case _:
            return "an object"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
