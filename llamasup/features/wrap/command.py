"""Supervises an existing llama-server command line (``llamasup wrap``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.parsers import one_of

if TYPE_CHECKING:
    from llamasup.core.supervision.events import Bus
    from llamasup.service.hosting import Service

commands = command_set()

Command = Annotated[list[str], argument("COMMAND", "After --: llama-server and its flags, unchanged.")]
ServerLog = Annotated[
    str,
    option(
        "--server-log",
        "stderr|file",
        "Write llama-server's log to standard error and to its file, or only to the file.",
        read=one_of("stderr", "file"),
    ),
]
Strict = Annotated[
    bool,
    flag(
        "--strict",
        "Also refuse what llama-server allows: foreign Host and Origin headers, tools, changes of "
        "/props and slots, and an address that other machines can reach without a key.",
    ),
]

Serving = Annotated[
    o.OptionValues,
    o.SERVING.with_help(
        "max_concurrent",
        "Limit of concurrent requests. Default: no limit, because llama-server has a queue; with --strict "
        "the number of slots.",
    ),
]


@commands.command(context_settings={"allow_interspersed_args": False})
@takes_groups
def wrap(
    ctx: typer.Context,
    command: Command,
    *,
    strict: Strict = False,
    serving: Serving,
    foreground: o.Foreground,
    parent: o.ParentProgram,
    logging: o.Logging,
    server_log: ServerLog = "stderr",
) -> int:
    """Supervise an existing llama-server command line, unchanged.

    Set the address, the API keys and TLS with llama-server's own flags: --host, --api-key-file,
    --ssl-cert-file.
    """
    from llamasup.cli.foreground import OutputOptions, open_sockets, serve_until_stopped

    def prepare() -> Callable[[Bus], Service]:
        from llamasup.features.wrap.planner import parse_command

        wrapping = parse_command(command, os.environ)
        if wrapping.line.prints_and_exits:
            _exec(command)
        from llamasup.features.wrap.options import WrapOptions
        from llamasup.service.hosting import Service

        options = WrapOptions(
            wrapping,
            sockets=open_sockets(),
            strict=strict,
            waits_for_first_load=o.was_given(ctx, "wait_timeout_s"),
            **serving,
            **foreground,
        )
        return partial(Service, options)

    output = OutputOptions(**parent, **logging, server_log=server_log)
    return serve_until_stopped(prepare, output, ctx.obj)


def _exec(command: Sequence[str]) -> None:
    """Run llama-server in place of llamasup: it only prints something (``--version``) and exits."""
    os.execvp(command[0], list(command))  # noqa: S606 - what the user typed, no shell
