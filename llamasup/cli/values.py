"""Reads what is typed for an option; says what it saw, which Typer's own messages do not."""

from __future__ import annotations

import typer

__all__ = ["seconds", "whole_number"]


def whole_number(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


def seconds(text: str | float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of seconds.") from None
    if not 0 <= value < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a time that can be waited.")
    return value
