"""The options that describe one model, for every command that takes one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llamasup.cli.command_group import Command
from llamasup.cli.options.from_settings import options_of_a_plan
from llamasup.cli.options.groups import Group, Option, in_section, text
from llamasup.core.settings.model import Settings

OF_MODEL = "The model"

_DASHES = "llamasup.after_dashes"


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
        list[str] | None,
        typer.Argument(
            metavar="[-- LLAMA-SERVER FLAGS]", help="Passed on to llama-server unchanged.", show_default=False
        ),
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
