"""Groups of options: each option is declared once, used by several commands, and can be written back.

A command names a parameter whose annotation carries a ``Group``. ``takes_groups`` puts the group's options in
its place, so that Typer sees each of them and the command gets one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from llamasup.cli.options.values import seconds, seconds_or_never, whole_number

__all__ = [
    "Group",
    "Option",
    "count",
    "duration",
    "many",
    "number",
    "path",
    "switch",
    "takes_groups",
    "text",
    "time_limit",
    "written_back",
]

Take = Callable[[typer.Context, Any], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``field`` is the name of its value in the group.

    ``shown`` is the parameter as Typer sees it, and ``unset`` its default there, which stands for the value
    ``default``. ``take`` makes the value, and ``spell`` writes it back.
    """

    field: str
    default: Any
    shown: Any
    unset: Any
    take: Take
    spell: Callable[[Any], list[str]]


@dataclass(frozen=True, slots=True)
class Group:
    """Options that belong together. ``make`` makes the value of the group from theirs, given by field."""

    options: tuple[Option, ...]
    make: Callable[..., Any] = dict


def takes_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """``command(ctx, …)`` as Typer sees it."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Group] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = next((each for each in get_args(hints[name])[1:] if isinstance(each, Group)), None)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
        else:
            groups[name] = group
            parameters += [
                inspect.Parameter(
                    option.field, parameter.KEYWORD_ONLY, default=option.unset, annotation=option.shown
                )
                for option in group.options
            ]

    @functools.wraps(command)
    def grouped(ctx: typer.Context, **given: Any) -> Any:
        values = {
            name: group.make(**{each.field: each.take(ctx, given.pop(each.field)) for each in group.options})
            for name, group in groups.items()
        }
        return command(ctx=ctx, **given, **values)

    grouped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    grouped.__annotations__ = {each.name: each.annotation for each in parameters}
    return grouped


def written_back(
    options: Iterable[Option], values: Mapping[str, Any], always: Iterable[str] = ()
) -> list[str]:
    """The arguments for ``values``: those that differ from their default, and those in ``always``."""
    words: list[str] = []
    for option in options:
        value = values[option.field]
        if value != option.default or option.field in always:
            words += option.spell(value)
    return words


# --- kinds of options --------------------------------------------------------------------------------


def text(
    flag: str,
    field: str,
    metavar: str,
    help: str | None,
    default: str | None = None,
    *,
    read: Callable[[str], Any] | None = None,
) -> Option:
    """``read`` converts the text, and returns a converted value unchanged."""
    return _option(flag, field, metavar, help, default, str, read=read)


def number(flag: str, field: str, metavar: str, help: str, default: int | None = None) -> Option:
    return _option(flag, field, metavar, help, default, int, read=whole_number)


def count(
    flag: str, field: str, metavar: str, help: str, default: int | None = None, *, least: int = 0
) -> Option:
    """A number of at least ``least``."""
    read = functools.partial(whole_number, least=least)
    return _option(flag, field, metavar, help, default, int, read=read)


def duration(flag: str, field: str, help: str, default: float) -> Option:
    return _option(flag, field, "SECONDS", help, default, float, read=seconds)


def time_limit(flag: str, field: str, help: str) -> Option:
    """Seconds; None, which means no limit, without the option and for 0."""
    return _option(flag, field, "SECONDS", help, None, float, read=seconds_or_never)


def path(flag: str, field: str, help: str) -> Option:
    return _option(flag, field, "PATH", help, None, Path)


def switch(flag: str, field: str, help: str, *, off: Any = False, on: Any = True) -> Option:
    """``off`` is its value if absent, ``on`` if present."""
    return Option(
        field,
        default=off,
        shown=Annotated[bool, typer.Option(flag, help=help)],
        unset=False,
        take=lambda _, given: on if given else off,
        spell=lambda value: [flag] if value == on else [],
    )


def many(flag: str, field: str, metavar: str, help: str, *, read: Callable[[str], str]) -> Option:
    """An option that can be repeated; its value is a tuple."""
    how = typer.Option(flag, metavar=metavar, help=f"{help} Repeatable.", parser=read)
    return Option(
        field,
        default=(),
        shown=Annotated[list[str] | None, how],
        unset=None,
        take=lambda _, given: tuple(given or ()),
        spell=lambda value: [word for each in value for word in (flag, each)],
    )


def _option(
    flag: str,
    field: str,
    metavar: str,
    help: str | None,
    default: Any,
    kind: Any,
    *,
    read: Callable[[Any], Any] | None = None,
) -> Option:
    shown = Annotated[kind | None, typer.Option(flag, metavar=metavar, help=help, parser=read)]
    return Option(
        field,
        default=default,
        shown=shown,
        unset=default,
        take=lambda _, given: given,
        spell=lambda value: [flag, f"{value:g}" if isinstance(value, float) else str(value)],
    )
