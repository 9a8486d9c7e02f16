"""``llamasup key …``: the commands and their options. What they do is in ``llamasup.cli.commands.key``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamasup.cli.options import shared as o
from llamasup.cli.options.values import one_of, whole_number

__all__ = ["key"]

key = typer.Typer(
    name="key",
    help="Make, list and revoke API keys; a running llamasup takes notice within a second.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _at_least_one(text: str | int) -> int:
    return whole_number(text, least=1)


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
File = Annotated[
    Path | None,
    typer.Option("--file", metavar="PATH", help="The file of keys; default: ~/.config/llamasup/keys."),
]
Rights = Annotated[
    str,
    typer.Option(
        "--rights",
        parser=one_of("inference", "control", "inference,control", "control,inference"),
        metavar="inference|control|inference,control",
        help="What the key is for: the model, llamasup's control API, or both.",
    ),
]
RequestsPerMinute = Annotated[
    int | None,
    typer.Option("--rpm", parser=_at_least_one, metavar="N", help="Requests per minute at most."),
]
Concurrent = Annotated[
    int | None,
    typer.Option("--concurrent", parser=_at_least_one, metavar="N", help="Requests at one time at most."),
]
TokensPerMinute = Annotated[
    int | None,
    typer.Option(
        "--tpm", parser=_at_least_one, metavar="N", help="Tokens per minute at most; cached ones are free."
    ),
]
Priority = Annotated[
    str,
    typer.Option(
        "--priority",
        parser=one_of("normal", "high"),
        metavar="normal|high",
        help="The highest priority that its requests may ask for.",
    ),
]
Models = Annotated[
    str | None,
    typer.Option(
        "--models",
        metavar="NAME,…",
        help="The only models that it may use, by their names; * and ? stand for any letters.",
    ),
]
Hashed = Annotated[
    bool, typer.Option("--hashed", help="Keep only a hash of the key: it is shown now, and never again.")
]


@key.command()
def new(
    name: Name,
    rights: Rights = "inference",
    rpm: RequestsPerMinute = None,
    concurrent: Concurrent = None,
    tpm: TokensPerMinute = None,
    priority: Priority = "normal",
    models: Models = None,
    hashed: Hashed = False,
    file: File = None,
    json: o.Json = False,
) -> None:
    """Make a key, add it to the file, and print it."""
    from llamasup.cli.commands.key import new_command

    sys.exit(
        new_command(
            name,
            file,
            rights=rights,
            rpm=rpm,
            concurrent=concurrent,
            tpm=tpm,
            priority=priority,
            models=models,
            hashed=hashed,
            json=json,
        )
    )


@key.command("list")
def list_(file: File = None, json: o.Json = False) -> None:
    """Show the names of the keys, and what each may do."""
    from llamasup.cli.commands.key import list_command

    sys.exit(list_command(file, json=json))


@key.command()
def revoke(name: Name, file: File = None, json: o.Json = False) -> None:
    """Remove a key from the file."""
    from llamasup.cli.commands.key import revoke_command

    sys.exit(revoke_command(name, file, json=json))
