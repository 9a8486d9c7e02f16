"""Declares the options that describe one model, from the declarations of settings (``settings/model.py``)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

import typer
from msgspec import structs

from llamasup.cli.command_group import Command, argument
from llamasup.cli.options.groups import Group, Option, in_section, many, switch, text, value_option
from llamasup.cli.options.parsers import of_kind, one_of, seconds, whole_number
from llamasup.core.settings.declaration import Flag, Setting, settings_of
from llamasup.core.settings.kinds import Boolean, Integer, IntegerOr, Kind, Many, OneOf, Time
from llamasup.core.settings.model import ModelSettings, Settings

OF_MODEL = "The model"

_DASHES = "llamasup.after_dashes"
_DECLARED: Final = dict(settings_of(ModelSettings).values())
_UNSET: Final = {field.name: field.default for field in structs.fields(Settings)}


def options_of_a_plan(*, checked: bool = False) -> tuple[tuple[Option, ...], tuple[Option, ...]]:
    """Make the options of the settings that decide a plan: the ones to show first, and the others.

    ``checked``: they have the bounds of a config. Otherwise the plan of the model refuses a wrong number.
    """
    flags = {field: setting.flag for field, setting in _DECLARED.items() if setting.flag is not None}
    of_plan = {field: flag for field, flag in flags.items() if not flag.of_service}
    options = {field: setting_option(field, checked=checked) for field in of_plan}
    first = tuple(options[field] for field, flag in of_plan.items() if flag.first)
    return first, tuple(options[field] for field, flag in of_plan.items() if not flag.first)


def setting_option(field: str, *, checked: bool = False) -> Option:
    """Make the option of a setting that has a flag."""
    setting = _DECLARED[field]
    flag = setting.flag
    assert flag is not None
    name = f"--{flag.name or field.removesuffix('_s').replace('_', '-')}"
    about = flag.help or setting.about
    default = _default(field, setting, flag)
    kind = setting.kind
    if isinstance(kind, Boolean):
        return switch(name, about, field=field, off=default, on=flag.on)
    if isinstance(kind, Many):
        read = of_kind(kind.kind)
        return many(
            name, flag.metavar, about, field=field, read=read, default=default, duplicates=kind.duplicates
        )
    metavar, python_type, read = _reading(kind, checked=checked or flag.checked, noun=flag.noun)
    return value_option(field, name, flag.metavar or metavar, about, default, python_type, read=read)


def _default(field: str, setting: Setting, flag: Flag) -> Any:
    """The value without the option. The service decides its own settings; a plan decides what is not set."""
    if not flag.of_service:
        return _UNSET[field]
    return None if isinstance(setting.default, str) else setting.default


def _reading(kind: Kind, *, checked: bool, noun: str) -> tuple[str, type, Any]:
    """The usual metavar, the type for Typer, and the function that reads the text; None: no check."""
    match kind:
        case OneOf(choices):
            return "|".join(choices), str, one_of(*choices)
        case IntegerOr(_, choices):
            return "|".join(("N", *choices)), str, partial(_integer_or, choices=choices, noun=noun)
        case Integer(minimum, maximum) if checked:
            return "N", int, partial(whole_number, minimum=minimum, maximum=maximum)
        case Integer():
            return "N", int, whole_number
        case Time():
            return "SECONDS", float, seconds
        case _:
            return "PATH", str, None


def _integer_or(text: str | int, *, choices: tuple[str, ...], noun: str) -> str | int:
    if isinstance(text, int) or text in choices:
        return text
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is not {', '.join((noun, *choices[:-1]))} or {choices[-1]}.")
    return int(text)


class WithExtra(Command):
    """Remembers the arguments after ``--``: the parser does not mark them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_DASHES] = args[args.index("--") + 1 :] if "--" in args else []
        return super().parse_args(ctx, args)


def _extra_arguments(ctx: typer.Context, extra: list[str] | None) -> tuple[str, ...]:
    """llama-server's own flags. A second argument before ``--`` is an error."""
    given, after = extra or [], ctx.meta[_DASHES]
    if len(given) > len(after):
        raise typer.BadParameter(
            f"unexpected argument {given[0]!r}: put llama-server's flags after --, and quote spaces."
        )
    return tuple(given)


_EXTRA = Option(
    "extra",
    default=(),
    annotation=Annotated[
        list[str] | None, argument("[-- LLAMA-SERVER FLAGS]", "Passed on to llama-server unchanged.")
    ],
    typer_default=None,
    convert=_extra_arguments,
    to_arguments=lambda flags: ["--", *flags],
)

_FIRST, _OTHERS = options_of_a_plan()

SETTINGS = Group(
    in_section(
        OF_MODEL,
        *_FIRST,
        text("--alias", "NAME", "Name of the model for clients."),
        *_OTHERS,
        _EXTRA,  # last: no option may follow its dashes
    ),
    make=Settings,
)
