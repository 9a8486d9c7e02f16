"""The commands that talk to a running llamasup: their options. What they do is in ``cli.control``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import Group, number, path, takes_groups, text
from llamasup.cli.options.values import whole_number

__all__ = ["add_control_commands"]

# Which llamasup: the arguments of ``cli.reach.reach``.
_WHERE = Group(
    (
        number("--pid", "pid", "PID", "The llamasup with this process number, where several run."),
        text(
            "--url",
            "url",
            "URL",
            "One that listens there; or set $LLAMASUP_URL. Needs a key that may control.",
        ),
        path("--api-key-file", "api_key_file", "File with that key; or set $LLAMASUP_API_KEY."),
    )
)
_MOST_LINES = 10_000


def _lines(text: str | int) -> int:
    count = whole_number(text, least=0)
    if count > _MOST_LINES:
        raise typer.BadParameter(f"{count} is more than {_MOST_LINES}.")
    return count


Where = Annotated[o.Given, _WHERE]
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Its name; not needed where there is only one.", show_default=False),
]
AllModels = Annotated[bool, typer.Option("--all", "-a", help="Those that are not loaded, too.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once.")]
Now = Annotated[bool, typer.Option("--now", help="Break off the requests in flight.")]
WaitForEnd = Annotated[bool, typer.Option("--wait", help="Return when it has ended.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")]
Lines = Annotated[
    int,
    typer.Option(
        "--lines",
        "-n",
        metavar="N",
        parser=_lines,
        help=f"How many of the last lines; at most {_MOST_LINES}.",
    ),
]


def add_control_commands(app: typer.Typer) -> None:
    for command in (ps, status, load, unload, restart, reload, stop, logs):
        app.command()(takes_groups(command))


def ps(ctx: typer.Context, *, where: Where, all_: AllModels = False, json: o.Json = False) -> None:
    """List the models of a running llamasup: state, size, device, slots, restarts."""
    from llamasup.cli.commands.control import ps_command

    sys.exit(ps_command(where, all_=all_, json=json))


def status(ctx: typer.Context, *, where: Where, all_: AllModels = False, json: o.Json = False) -> None:
    """Show how a running llamasup does; exit code 1 where a model has failed."""
    from llamasup.cli.commands.control import status_command

    sys.exit(status_command(where, all_=all_, json=json))


def load(
    ctx: typer.Context, model: Model = None, *, where: Where, no_wait: NoWait = False, json: o.Json = False
) -> None:
    """Load a model, and wait until it serves."""
    from llamasup.cli.commands.control import load_command

    sys.exit(load_command(where, model, wait=not no_wait, json=json))


def unload(
    ctx: typer.Context, model: Model = None, *, where: Where, no_wait: NoWait = False, json: o.Json = False
) -> None:
    """Unload a model, and wait until its memory is free; requests in flight may finish."""
    from llamasup.cli.commands.control import unload_command

    sys.exit(unload_command(where, model, wait=not no_wait, json=json))


def restart(
    ctx: typer.Context, model: Model = None, *, where: Where, no_wait: NoWait = False, json: o.Json = False
) -> None:
    """Start a model's llama-server anew (without MODEL: all that are loaded); requests wait meanwhile."""
    from llamasup.cli.commands.control import restart_command

    sys.exit(restart_command(where, model, wait=not no_wait, json=json))


def reload(ctx: typer.Context, *, where: Where, no_wait: NoWait = False, json: o.Json = False) -> None:
    """Read the configuration again; of `run` and `wrap`: restart the model."""
    from llamasup.cli.commands.control import reload_command

    sys.exit(reload_command(where, wait=not no_wait, json=json))


def stop(
    ctx: typer.Context, *, where: Where, now: Now = False, wait: WaitForEnd = False, json: o.Json = False
) -> None:
    """Stop a running llamasup; requests in flight may finish."""
    from llamasup.cli.commands.control import stop_command

    sys.exit(stop_command(where, now=now, wait=wait, json=json))


def logs(
    ctx: typer.Context,
    model: Model = None,
    *,
    where: Where,
    follow: Follow = False,
    lines: Lines = 200,
) -> None:
    """Show the log of a model's llama-server."""
    from llamasup.cli.commands.control import logs_command

    sys.exit(logs_command(where, model, lines=lines, follow=follow))
