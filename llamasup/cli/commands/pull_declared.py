"""``llamasup pull`` and ``llamasup rm``: their options. What they do is in ``cli.pull`` and ``cli.rm``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from llamasup.cli.options import shared as o
from llamasup.cli.options.values import whole_number

__all__ = ["pull", "rm"]

_MOST_PARALLEL = 16  # what a hub's servers take from one address without a word


def _parallel(text: str | int) -> int:
    value = whole_number(text, least=1)
    if value > _MOST_PARALLEL:
        raise typer.BadParameter(f"{value} is more than {_MOST_PARALLEL}.")
    return value


Refs = Annotated[
    list[str],
    typer.Argument(
        metavar="REF...",
        help="org/repo, org/repo:QUANT, org/repo:FILE.gguf, or the https URL of a .gguf file.",
        show_default=False,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="org/repo[:QUANT], a URL, or a file there.", show_default=False),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder", metavar="DIR", help="The models folder; default: ~/.local/share/llamasup/models."
    ),
]
Quant = Annotated[
    str | None,
    typer.Option("--quant", metavar="QUANT", help="As org/repo:QUANT; default: Q4_K_M or nearest."),
]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", metavar="URL", help="Another hub, a mirror; or set $HF_ENDPOINT.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="PATH", help="File with the hub's token; or set $HF_TOKEN."),
]
AllowPrivate = Annotated[
    bool, typer.Option("--allow-private", help="Also from addresses that are not public ones.")
]
AllowHttp = Annotated[
    bool, typer.Option("--allow-http", help="Also over plain http, which anybody can change.")
]
Parallel = Annotated[
    int, typer.Option("--parallel", parser=_parallel, metavar="N", help="Requests at a time, for one file.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def pull(
    refs: Refs,
    *,
    folder: Folder = None,
    quant: Quant = None,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    allow_private: AllowPrivate = False,
    allow_http: AllowHttp = False,
    parallel: Parallel = 4,
    json: o.Json = False,
) -> None:
    """Download models: the hub's GGUF repositories, or any https URL. Goes on where it was stopped."""
    from llamasup.cli.commands.pull import PullOptions, pull_command

    options = PullOptions(
        folder=folder,
        quant=quant,
        endpoint=endpoint,
        token_file=token_file,
        allow_private=allow_private,
        allow_http=allow_http,
        parallel=parallel,
        json=json,
    )
    sys.exit(pull_command(refs, options))


def rm(models: Models, *, folder: Folder = None, yes: Yes = False, json: o.Json = False) -> None:
    """Remove models from the models folder: every part, the projector, what unfinished downloads left."""
    from llamasup.cli.commands.rm import rm_command

    sys.exit(rm_command(models, folder=folder, yes=yes, json=json))
