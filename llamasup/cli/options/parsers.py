"""Parses the values of options. The messages name the value, unlike Typer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from llamasup.core.settings.kinds import InvalidValue, SizeText
from llamasup.core.settings.units import Size
from llamasup.errors import UsageInvalid


def whole_number(text: str | int, *, minimum: int | None = None, maximum: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None
    if minimum is not None and value < minimum:
        raise typer.BadParameter(f"{value} is less than {minimum}.")
    if maximum is not None and value > maximum:
        raise typer.BadParameter(f"{value} is more than {maximum}.")
    return value


def seconds(text: str | float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of seconds.") from None
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a valid number of seconds.")
    return value


def seconds_or_never(text: str | float) -> float | None:
    """0 means no limit."""
    return seconds(text) or None


def size(text: str | Size) -> Size:
    kind = SizeText(percent=False)
    return kind.parse(of_kind(kind)(str(text)))


def one_of(*values: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text in values:
            return text
        *others, last = values
        raise typer.BadParameter(f"{text!r} is not {', '.join(others) + ' or ' if others else ''}{last}.")

    return read


def checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Make a parser of ``check``, whose UsageInvalid becomes an error of the command line."""

    def read(text: str) -> str:
        try:
            return check(text)
        except UsageInvalid as error:
            raise typer.BadParameter(" ".join(filter(None, (error.message, error.remedy)))) from None

    return read


def of_kind(kind: Any) -> Callable[[str], str]:
    """Make a parser of a setting's kind. A value that is not text is only checked, and parsed again later."""

    def read(text: str) -> str:
        try:
            parsed = kind.parse(text)
        except InvalidValue as error:
            why = f" ({error.why})" if error.why else ""
            raise typer.BadParameter(f"{text!r} is not {kind.allowed}{why}.") from None
        return parsed if isinstance(parsed, str) else text

    return read
