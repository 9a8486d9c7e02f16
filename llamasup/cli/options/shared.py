"""Options that several commands have, each declared once: arguments, single options, and groups."""

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
from llamasup.cli.options.values import checked, one_of
from llamasup.http.address import allowed_host, allowed_media_host, allowed_origin
from llamasup.llama_server.settings import Settings
from llamasup.supervision.backoff import HALF_OPEN_S, RestartPolicy

__all__ = [
    "ATTACHED",
    "BESIDE_CONFIG",
    "FOREGROUND",
    "LISTENING",
    "LOGGING",
    "SERVING",
    "Attached",
    "BesideConfig",
    "ConfigFile",
    "Foreground",
    "Json",
    "Listening",
    "Logging",
    "Model",
    "ModelSettings",
    "ModelsFolder",
    "OptionValues",
    "RuntimeOption",
    "Serving",
    "Watch",
    "run_arguments",
    "serve_arguments",
    "was_given",
]

OptionValues = dict[str, Any]
"""Values by field: keyword arguments."""

# --- what commands take ------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A GGUF file, org/repo[:quant], an https URL, or 'demo'.", show_default=False
    ),
]
ModelsFolder = Annotated[
    Path | None,
    typer.Option(
        "--folder", metavar="DIR", help="The models folder. Default: ~/.local/share/llamasup/models."
    ),
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime", metavar="PATH|NAME|embedded", help="The llama-server to use. Env: $LLAMASUP_RUNTIME."
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Config file. Default: $LLAMASUP_CONFIG, "
        "~/.config/llamasup/config.yaml or /etc/llamasup/config.yaml.",
    ),
]
Watch = Annotated[
    bool, typer.Option("--watch", help="Reload the config when it changes, as with `watch: true`.")
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
            "Addresses and Unix sockets (*.sock) to listen on.",
            "127.0.0.1",
        ),
        number("--port", "port", "N", "Port to listen on; 0 for any free port.", 8080),
        path("--tls-cert", "tls_cert", "PEM certificate with its chain, for https."),
        path("--tls-key", "tls_key", "PEM key of the certificate."),
        path("--api-key-file", "api_key_file", "File with one API key per line. Env: $LLAMASUP_API_KEY."),
    )
)

# How any service serves: the fields of ServiceOptions.
SERVING = Group(
    (
        switch(
            "--insecure-no-auth",
            "insecure_no_auth",
            "Accept requests from other machines without an API key.",
        ),
        many(
            "--allow-host",
            "hosts",
            "NAME",
            "Accept this name in the Host header, in addition to localhost and the address.",
            read=checked(allowed_host),
        ),
        many(
            "--allow-origin",
            "origins",
            "ORIGIN",
            "Allow requests from web pages of this origin, such as http://localhost:3000.",
            read=checked(allowed_origin),
        ),
        many(
            "--remote-media",
            "remote_media",
            "HOST",
            "Let llama-server fetch media URLs in requests from this host, or from `any` host.",
            read=checked(allowed_media_host),
        ),
        count(
            "--max-concurrent",
            "max_concurrent",
            "N",
            "Limit of concurrent requests. Default: the number of slots.",
            least=1,
        ),
        count("--max-queued", "max_queued", "N", "Limit of queued requests; further ones are refused.", 256),
        duration(
            "--wait-timeout",
            "wait_timeout_s",
            "How long a request may wait for a busy or loading model; 0: not at all.",
            120.0,
        ),
        time_limit("--request-timeout", "request_timeout_s", "How long a request may take; 0: no limit."),
        switch(
            "--stream-keepalive",
            "stream_keepalive",
            "Send comments on streams that wait, so that no proxy closes the connection.",
        ),
        switch("--no-warmup", "warm_up", "Do not generate a test token after a start.", off=True, on=False),
        duration(
            "--drain-timeout", "drain_timeout_s", "Time for requests in flight to finish at a stop.", 30.0
        ),
        duration(
            "--stop-timeout",
            "stop_timeout_s",
            "Time for llama-server to exit before it is killed.",
            10.0,
        ),
        path("--access-log", "access_log", "File for one JSON object per request; - for standard error."),
        time_limit("--slow-request", "slow_request_s", "Log requests that take longer. Default: none."),
    )
)

# Only for a service without a service manager: fields of ServiceOptions.
FOREGROUND = Group(
    (
        switch(
            "--keep-trying",
            "restart",
            "After too many crashes, retry every 5 minutes instead of exiting.",
            off=RestartPolicy(),
            on=RestartPolicy(half_open_s=HALF_OPEN_S),
        ),
        path(
            "--ready-file",
            "ready_file",
            "File to write the address to once llamasup is ready; removed at a stop.",
        ),
    )
)

# What serve takes in addition to its config: the fields that are given.
BESIDE_CONFIG = Group(
    (
        many(
            "--models-dir",
            "models_dir",
            "FOLDER",
            "Serve the models in this folder. With it a config is optional.",
            read=str,
        ),
        text(
            "--host",
            "host",
            "ADDRESS|PATH,...",
            "Addresses and Unix sockets to listen on; replaces the config's `listen`.",
        ),
        number("--port", "port", "N", "Port to listen on; 0 for any free port. Replaces the config's."),
        switch(
            "--insecure-no-auth",
            "insecure_no_auth",
            "Accept requests from other machines without an API key.",
        ),
        path("--api-key-file", "api_key_file", "File with one API key per line; replaces the config's."),
        path("--tls-cert", "tls_cert", "PEM certificate with its chain; replaces the config's."),
        path("--tls-key", "tls_key", "PEM key of the certificate."),
        path("--token-file", "token_file", "File with the hub's token; replaces the config's."),
        path("--ready-file", "ready_file", "File to write the address to once llamasup is ready."),
    )
)

# For a program that starts llamasup: fields of OutputOptions.
ATTACHED = Group(
    (
        text(
            "--events",
            "events",
            "jsonl",
            "Write events to standard output, one JSON object per line.",
            read=one_of("jsonl"),
        ),
        switch(
            "--sidecar",
            "sidecar",
            "Run as a part of another program: any free port, events on standard output, "
            "stop when standard input closes.",
        ),
        number("--parent-pid", "parent_pid", "PID", "Stop when this process exits."),
    )
)

# Fields of OutputOptions.
_LEVELS = ("debug", "info", "warning", "error")
LOGGING = Group(
    (
        text(
            "--log-level",
            "log_level",
            "|".join(_LEVELS),
            "Least severe messages to log.",
            "info",
            read=one_of(*_LEVELS),
        ),
        text(
            "--log-format",
            "log_format",
            "text|json",
            "Format of the log.",
            "text",
            read=one_of("text", "json"),
        ),
    )
)

ModelSettings = Annotated[Settings, SETTINGS]
Listening = Annotated[OptionValues, LISTENING]
Serving = Annotated[OptionValues, SERVING]
Foreground = Annotated[OptionValues, FOREGROUND]
BesideConfig = Annotated[OptionValues, BESIDE_CONFIG]
Attached = Annotated[OptionValues, ATTACHED]
Logging = Annotated[OptionValues, LOGGING]

# --- written back -----------------------------------------------------------------------------------

_OF_SERVICES = (*LISTENING.options, *SERVING.options, *LOGGING.options)
# A unit file repeats these, so its command line has them whatever the defaults of a later version.
_ALWAYS = ("host", "port", "drain_timeout_s", "stop_timeout_s")


def run_arguments(model: str, settings: Settings, given: Mapping[str, Any], runtime: str) -> list[str]:
    """The command line of ``llamasup run`` with these values; values that are the default are left out.

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
    """The command line of ``llamasup serve`` with these values.

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
    """Whether the option of ``field`` is on the command line or in the environment."""
    source = ctx.get_parameter_source(field)
    return source is not None and source.name != "DEFAULT"
