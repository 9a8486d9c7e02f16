"""The options that commands share, each declared once: arguments, single options, and groups of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llamasup.cli.options.groups import (
    Group,
    count,
    duration,
    many,
    number,
    path,
    switch,
    text,
    time_limit,
    written_back,
)
from llamasup.cli.options.model import SETTINGS
from llamasup.cli.options.values import checked, one_of, whole_number
from llamasup.http.address import allowed_host, allowed_media_host, allowed_origin
from llamasup.llama_server.settings import Settings
from llamasup.supervision.backoff import HALF_OPEN_S, RestartPolicy

__all__ = [
    "ATTACHED",
    "FOREGROUND",
    "LISTENING",
    "LOGGING",
    "SERVING",
    "Attached",
    "Command",
    "Folders",
    "Foreground",
    "Given",
    "Json",
    "Listening",
    "Logging",
    "Model",
    "ModelSettings",
    "ModelToCheck",
    "ModelsOrFolders",
    "Port",
    "RuntimeOption",
    "ServerLog",
    "Serving",
    "Strict",
    "run_arguments",
    "serve_arguments",
    "was_given",
]

Given = dict[str, Any]
"""Values by field: keyword arguments."""

# --- what commands take ------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A GGUF file, org/repo[:quant], an https URL, or 'demo'.", show_default=False
    ),
]
ModelsOrFolders = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL|FOLDER...",
        help="GGUF files, folders of them, or 'demo'.",
        show_default=False,
    ),
]
Folders = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FOLDER...",
        help="Folders of models; by default llamasup's own and the caches of Hugging Face and llama.cpp.",
        show_default=False,
    ),
]
ModelToCheck = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Also look whether this one can be served.", show_default=False),
]
CertificateToCheck = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="PATH", help="Also check the dates of this PEM certificate."),
]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND", help="After --: llama-server and its flags, as they are.", show_default=False
    ),
]
Port = Annotated[
    int, typer.Option("--port", parser=whole_number, metavar="N", help="Port that is to be served on.")
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime", metavar="PATH|NAME|embedded", help="The llama-server to use; or set $LLAMASUP_RUNTIME."
    ),
]
ServerLog = Annotated[
    str,
    typer.Option(
        "--server-log",
        metavar="stderr|file",
        parser=one_of("stderr", "file"),
        help="Where llama-server's own log goes: to standard error as it does alone, or to its file only.",
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
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Default: $LLAMASUP_CONFIG, ~/.config/llamasup/config.yaml or /etc/llamasup/config.yaml.",
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Take changes of the config over as they are made, as `watch: true`.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# --- groups ------------------------------------------------------------------------------------------

# Where ``run`` listens: the fields of RunOptions.
LISTENING = Group(
    (
        text(
            "--host",
            "host",
            "ADDRESS|PATH,...",
            "Where to listen: addresses, and Unix sockets (*.sock).",
            "127.0.0.1",
        ),
        number("--port", "port", "N", "Port to listen on; 0 takes any free one.", 8080),
        path("--tls-cert", "tls_cert", "PEM certificate and its chain: serve https."),
        path("--tls-key", "tls_key", "Its PEM key."),
        path("--api-key-file", "api_key_file", "File with one key a line; or set $LLAMASUP_API_KEY."),
    )
)

# How any service serves: the fields of ServiceOptions.
SERVING = Group(
    (
        switch(
            "--insecure-no-auth",
            "insecure_no_auth",
            "Allow another address than loopback without a key.",
        ),
        many(
            "--allow-host",
            "hosts",
            "NAME",
            "Accept this name in Host, besides localhost and the address.",
            read=checked(allowed_host),
        ),
        many(
            "--allow-origin",
            "origins",
            "ORIGIN",
            "Let web pages from here call, such as http://localhost:3000.",
            read=checked(allowed_origin),
        ),
        many(
            "--remote-media",
            "remote_media",
            "HOST",
            "Let llama-server fetch media URLs of requests from this host; any: from every host.",
            read=checked(allowed_media_host),
        ),
        count(
            "--max-concurrent",
            "max_concurrent",
            "N",
            "Requests that run at once; default: the slots.",
            least=1,
        ),
        count("--max-queued", "max_queued", "N", "Requests that may wait; more are refused.", 256),
        duration(
            "--wait-timeout",
            "wait_timeout_s",
            "How long a request may wait for a model that loads, restarts or is busy; 0: not at all.",
            120.0,
        ),
        time_limit("--request-timeout", "request_timeout_s", "How long a request may take; 0: no limit."),
        switch(
            "--stream-keepalive",
            "stream_keepalive",
            "Send comments to a stream that waits, so that nothing on the way gives it up.",
        ),
        switch("--no-warmup", "warm_up", "Serve without the proof of a real token.", off=True, on=False),
        duration(
            "--drain-timeout", "drain_timeout_s", "How long requests in flight may finish at a stop.", 30.0
        ),
        duration(
            "--stop-timeout",
            "stop_timeout_s",
            "How long llama-server may take to end before it is killed.",
            10.0,
        ),
        path("--access-log", "access_log", "One JSON object a request; -: to standard error."),
        time_limit("--slow-request", "slow_request_s", "Log requests that take longer; 0: none."),
    )
)

# What only a service without a service manager needs: fields of ServiceOptions.
FOREGROUND = Group(
    (
        switch(
            "--keep-trying",
            "restart",
            "After too many crashes try again every 5 minutes, and do not end.",
            off=RestartPolicy(),
            on=RestartPolicy(half_open_s=HALF_OPEN_S),
        ),
        path(
            "--ready-file",
            "ready_file",
            "Written with the address once requests are served; removed at the stop.",
        ),
    )
)

# What serve can be told beside its config: of its fields those that are given.
BESIDE_CONFIG = Group(
    (
        many(
            "--models-dir",
            "models_dir",
            "FOLDER",
            "Serve the models of this folder; without --config there need be no config.",
            read=str,
        ),
        text("--host", "host", "ADDRESS|PATH,...", "Where to listen, instead of the config's `listen`."),
        number("--port", "port", "N", "Port to listen on, instead of the config's; 0 takes any free one."),
        switch(
            "--insecure-no-auth",
            "insecure_no_auth",
            "Allow another address than loopback without a key.",
        ),
        path("--api-key-file", "api_key_file", "File of keys, instead of the config's."),
        path("--tls-cert", "tls_cert", "PEM certificate and its chain, instead of the config's."),
        path("--tls-key", "tls_key", "Its PEM key."),
        path("--token-file", "token_file", "File with the hub's token, instead of the config's."),
        path("--ready-file", "ready_file", "Written with the address once requests are served."),
    )
)

# For the program that started it: fields of OutputOptions.
ATTACHED = Group(
    (
        text(
            "--events",
            "events",
            "jsonl",
            "Events on standard output, one object a line.",
            read=one_of("jsonl"),
        ),
        switch(
            "--sidecar",
            "sidecar",
            "For the program that starts it: any free port, events on standard output, "
            "stop when standard input ends.",
        ),
        number("--parent-pid", "parent_pid", "PID", "Stop when this process ends."),
    )
)

# Fields of OutputOptions.
_LEVELS = ("debug", "info", "warning", "error")
LOGGING = Group(
    (
        text("--log-level", "log_level", "|".join(_LEVELS), None, "info", read=one_of(*_LEVELS)),
        text("--log-format", "log_format", "text|json", None, "text", read=one_of("text", "json")),
    )
)

ModelSettings = Annotated[Settings, SETTINGS]
Listening = Annotated[Given, LISTENING]
Serving = Annotated[Given, SERVING]
Foreground = Annotated[Given, FOREGROUND]
BesideConfig = Annotated[Given, BESIDE_CONFIG]
Attached = Annotated[Given, ATTACHED]
Logging = Annotated[Given, LOGGING]

# --- back again --------------------------------------------------------------------------------------

_OF_SERVICES = (*LISTENING.options, *SERVING.options, *LOGGING.options)
# What the unit of a service says too is in its command line whatever the defaults of a later version.
_ALWAYS = ("host", "port", "drain_timeout_s", "stop_timeout_s")


def run_arguments(model: str, settings: Settings, given: Mapping[str, Any], runtime: str) -> list[str]:
    """The command line of ``llamasup run`` that means this: what differs from the defaults is written.

    ``given`` are the values of ``Listening``, ``Serving`` and ``Logging``.
    """
    chosen = {option.field: getattr(settings, option.field) for option in SETTINGS.options}
    *options, extra = SETTINGS.options
    return [
        "run",
        model,
        *written_back(options, chosen),
        *written_back(_OF_SERVICES, given, _ALWAYS),
        "--runtime",
        runtime,
        *written_back([extra], chosen),
    ]


def serve_arguments(config: Path | None, given: Mapping[str, Any], runtime: str) -> list[str]:
    """The command line of ``llamasup serve`` that means this.

    ``given`` are the values of ``BesideConfig`` and ``Logging``, and ``watch``.
    """
    return [
        "serve",
        *([] if config is None else ["--config", str(config)]),
        *(["--watch"] if given["watch"] else []),
        *written_back((*BESIDE_CONFIG.options, *LOGGING.options), given),
        "--runtime",
        runtime,
    ]


def was_given(ctx: typer.Context, field: str) -> bool:
    """Whether somebody chose the option of ``field``, rather than leaving it at its default."""
    source = ctx.get_parameter_source(field)
    return source is not None and source.name != "DEFAULT"
