"""``llamasup config …``: the commands and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamasup.cli.options import shared as o

__all__ = ["config"]

config = typer.Typer(
    name="config",
    help="Write, check and describe the configuration of serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="Default: $LLAMASUP_CONFIG, ~/.config/llamasup/config.yaml or /etc/llamasup/config.yaml.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="PATH",
        help="Where to; -: standard output. Default: ~/.config/llamasup/config.yaml.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]


@config.command()
def init(output: Output = None, force: Force = False) -> None:
    """Write a commented config for this machine."""
    from llamasup.cli.commands.config import init_command

    sys.exit(init_command(output, force=force))


@config.command()
def check(file: File = None, json: o.Json = False) -> None:
    """Say everything that is wrong with a config and with what it names; start nothing."""
    from llamasup.cli.commands.config import check_command

    sys.exit(check_command(file, json=json))


@config.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors."""
    from llamasup.cli.commands.config import schema_command

    sys.exit(schema_command())
