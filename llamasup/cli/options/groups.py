"""Groups of options: each option is declared once, for several commands, and can be formatted again.

A command has a parameter whose annotation contains a ``Group``. ``takes_groups`` replaces it by the options
of the group, so that Typer sees each option and the command gets one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from msgspec import Struct
from msgspec.structs import replace

from llamasup.cli.command_group import parameters_of, with_parameters
from llamasup.cli.options.parsers import seconds, seconds_or_never, size, whole_number
from llamasup.core.settings.units import Size

Convert = Callable[[typer.Context, Any], Any]


class Option(Struct, frozen=True):
    """One option. ``field`` is the name of its value in the group.

    ``annotation`` and ``typer_default`` declare the parameter for Typer. ``convert`` makes the value, which
    is ``default`` without the option, and ``to_arguments`` formats the value as arguments.
    """

    field: str
    default: Any
    annotation: Any
    typer_default: Any
    convert: Convert
    to_arguments: Callable[[Any], list[str]]
    section: str = ""
    """Its section of the help."""

    @property
    def shown_annotation(self) -> Any:
        return self._annotated(rich_help_panel=self.section) if self.section else self.annotation

    def with_help(self, help: str) -> Option:
        """Copy the option for a command in which it has another help."""
        return replace(self, annotation=self._annotated(help=help))

    def _annotated(self, **changes: str) -> Any:
        kind, info = get_args(self.annotation)
        info = copy(info)  # another group may show it in another section
        for name, value in changes.items():
            setattr(info, name, value)
        return Annotated[kind, info]


def in_section(section: str, *options: Option) -> tuple[Option, ...]:
    """These options in one section of the help."""
    return tuple(replace(option, section=section) for option in options)


class Group(Struct, frozen=True):
    """Options that belong together. ``make`` makes one value from their values by field."""

    options: tuple[Option, ...]
    make: Callable[..., Any] = dict

    def with_help(self, field: str, help: str) -> Group:
        """Copy the group for a command in which the option ``field`` has another help."""
        options = (each.with_help(help) if each.field == field else each for each in self.options)
        return replace(self, options=tuple(options))


def takes_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` a parameter for each option of its groups. A parameter ``ctx`` gets the context."""
    groups: dict[str, Group] = {}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    own = parameters_of(command)
    takes_context = any(parameter.name == "ctx" for parameter in own)
    for parameter in own:
        extras = get_args(parameter.annotation)[1:]
        group = next((extra for extra in extras if isinstance(extra, Group)), None)
        if group is not None:
            groups[parameter.name] = group
            parameters += [
                inspect.Parameter(
                    option.field,
                    parameter.KEYWORD_ONLY,
                    default=option.typer_default,
                    annotation=option.shown_annotation,
                )
                for option in group.options
            ]
        elif parameter.name != "ctx":
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def grouped(ctx: typer.Context, **given: Any) -> Any:
        values = {
            name: group.make(
                **{option.field: option.convert(ctx, given.pop(option.field)) for option in group.options}
            )
            for name, group in groups.items()
        }
        context = {"ctx": ctx} if takes_context else {}
        return command(**context, **given, **values)

    return with_parameters(grouped, parameters)


def format_arguments(
    options: Iterable[Option], values: Mapping[str, Any], always: Iterable[str] = ()
) -> list[str]:
    """Format the ``values`` that differ from their default or are in ``always`` as arguments."""
    arguments: list[str] = []
    for option in options:
        value = values[option.field]
        if value != option.default or option.field in always:
            arguments += option.to_arguments(value)
    return arguments


# --- kinds of options --------------------------------------------------------------------------------
# The field is the flag's name, unless it is given.


def text(
    flag: str,
    metavar: str,
    help: str,
    default: str | None = None,
    *,
    read: Callable[[str], Any] | None = None,
) -> Option:
    """Declare an option with text. ``read`` converts it, and returns a converted value unchanged."""
    return value_option(_field(flag), flag, metavar, help, default, str, read=read)


def number(flag: str, metavar: str, help: str, default: int | None = None) -> Option:
    return value_option(_field(flag), flag, metavar, help, default, int, read=whole_number)


def size_limit(flag: str, help: str) -> Option:
    return value_option(_field(flag), flag, "SIZE", help, None, Size, read=size)


def duration(flag: str, help: str, default: float) -> Option:
    return value_option(f"{_field(flag)}_s", flag, "SECONDS", help, default, float, read=seconds)


def time_limit(flag: str, help: str) -> Option:
    """Seconds; None (no limit) for 0 and without the option."""
    return value_option(f"{_field(flag)}_s", flag, "SECONDS", help, None, float, read=seconds_or_never)


def path(flag: str, help: str, metavar: str = "PATH") -> Option:
    return value_option(_field(flag), flag, metavar, help, None, Path)


def switch(flag: str, help: str, *, field: str | None = None, off: Any = False, on: Any = True) -> Option:
    """Declare an option without a value: it is ``off`` if absent, ``on`` if present."""
    return Option(
        field or _field(flag),
        default=off,
        annotation=Annotated[bool, typer.Option(flag, help=help)],
        typer_default=False,
        convert=lambda _, given: on if given else off,
        to_arguments=lambda value: [flag] if value == on else [],
    )


def many(
    flag: str,
    metavar: str,
    help: str,
    *,
    field: str | None = None,
    read: Callable[[str], str],
    default: tuple[str, ...] | None = (),
    duplicates: Callable[[Sequence[str]], Sequence[int]] = lambda _: (),
) -> Option:
    """An option that can be repeated; its value is a tuple, or ``default``.

    ``duplicates``: the positions of the values that repeat an earlier one, which is an error.
    """

    def convert(_: typer.Context, given: Sequence[str] | None) -> tuple[str, ...] | None:
        if given and (repeated := duplicates(given)):
            raise typer.BadParameter(f"{given[repeated[0]]} is given twice; give it once.", param_hint=flag)
        return tuple(given) if given else default

    option = typer.Option(flag, metavar=metavar, help=f"{help} Repeatable.", parser=read)
    return Option(
        field or _field(flag),
        default=default,
        annotation=Annotated[list[str] | None, option],
        typer_default=None,
        convert=convert,
        to_arguments=lambda value: [argument for item in value for argument in (flag, item)],
    )


def value_option(
    field: str,
    flag: str,
    metavar: str,
    help: str,
    default: Any,
    kind: Any,
    *,
    read: Callable[[Any], Any] | None = None,
) -> Option:
    """An option with a value of the type ``kind``. A ``metavar`` in brackets: it may be left out, so that the
    flag and the value are one argument.
    """

    def to_arguments(value: Any) -> list[str]:
        written = f"{value:g}" if isinstance(value, float) else str(value)
        return [f"{flag}={written}"] if metavar.startswith("[") else [flag, written]

    return Option(
        field,
        default=default,
        annotation=Annotated[kind | None, typer.Option(flag, metavar=metavar, help=help, parser=read)],
        typer_default=default,
        convert=lambda _, given: given,
        to_arguments=to_arguments,
    )


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
