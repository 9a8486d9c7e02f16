"""The options that commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamasup.cli.values import seconds, whole_number

__all__ = [
    "ApiKeyFile",
    "Command",
    "DrainTimeout",
    "Events",
    "Host",
    "InsecureNoAuth",
    "Json",
    "KeepTrying",
    "LogFormat",
    "LogLevel",
    "Model",
    "ModelToCheck",
    "ModelsOrFolders",
    "NoWarmup",
    "ParentPid",
    "Port",
    "ReadyFile",
    "RuntimeOption",
    "Sidecar",
    "StopTimeout",
    "Strict",
    "WaitTimeout",
    "was_given",
]


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or 'demo'.", show_default=False)]
ModelsOrFolders = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL|FOLDER...",
        help="GGUF files, folders of them, or 'demo'.",
        show_default=False,
    ),
]
ModelToCheck = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Also look whether this one can be served.", show_default=False),
]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[
    int,
    typer.Option("--port", parser=whole_number, metavar="N", help="Port to listen on; 0 takes any free one."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file", metavar="PATH", help="File with one key a line; or set $LLAMASUP_API_KEY."
    ),
]
InsecureNoAuth = Annotated[
    bool,
    typer.Option("--insecure-no-auth", help="Allow another address than loopback without a key."),
]

RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime", metavar="PATH|NAME|embedded", help="The llama-server to use; or set $LLAMASUP_RUNTIME."
    ),
]
NoWarmup = Annotated[
    bool,
    typer.Option("--no-warmup", help="Serve without the proof of a real token."),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--drain-timeout",
        parser=seconds,
        metavar="SECONDS",
        help="How long requests in flight may finish at a stop.",
    ),
]
StopTimeout = Annotated[
    float,
    typer.Option(
        "--stop-timeout",
        parser=seconds,
        metavar="SECONDS",
        help="How long llama-server may take to end before it is killed.",
    ),
]
WaitTimeout = Annotated[
    float,
    typer.Option(
        "--wait-timeout",
        parser=seconds,
        metavar="SECONDS",
        help="How long a request may wait for a model that loads or restarts; 0: answer 503 at once.",
    ),
]
KeepTrying = Annotated[
    bool,
    typer.Option("--keep-trying", help="After too many crashes try again every 5 minutes, and do not end."),
]
ReadyFile = Annotated[
    Path | None,
    typer.Option(
        "--ready-file",
        metavar="PATH",
        help="Written with the address once requests are served; removed at the stop.",
    ),
]
Events = Annotated[
    str | None,
    typer.Option("--events", metavar="jsonl", help="Events on standard output, one object a line."),
]
Sidecar = Annotated[
    bool,
    typer.Option(
        "--sidecar",
        help="For the program that starts it: any free port, events on standard output, "
        "stop when standard input ends.",
    ),
]
ParentPid = Annotated[
    int | None,
    typer.Option("--parent-pid", parser=whole_number, metavar="PID", help="Stop when this process ends."),
]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="debug|info|warning|error")]
LogFormat = Annotated[str, typer.Option("--log-format", metavar="text|json")]
ServerLog = Annotated[
    str,
    typer.Option(
        "--server-log",
        metavar="stderr|file",
        help="Where llama-server's own log goes: to standard error as it does alone, or to its file only.",
    ),
]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND", help="After --: llama-server and its flags, as they are.", show_default=False
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse what llama-server lets pass: foreign Host and Origin headers, tools, changes of "
        "/props and slots, an address that others can reach without a key.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def was_given(ctx: typer.Context, option: str) -> bool:
    """Whether somebody chose ``option``, rather than leaving it at its default."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"
