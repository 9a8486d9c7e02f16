"""Declares the arguments, options and groups of options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llamasup.cli.command_group import argument, flag, option
from llamasup.cli.options.groups import (
    Group,
    duration,
    format_arguments,
    in_section,
    many,
    number,
    path,
    size_limit,
    switch,
    text,
    time_limit,
)
from llamasup.cli.options.model import SETTINGS, options_of_a_plan, setting_option
from llamasup.cli.options.parsers import checked, of_kind, one_of
from llamasup.core.http.address import allowed_host, allowed_media_host, allowed_origin
from llamasup.core.settings.kinds import ProxyAddress
from llamasup.core.settings.model import Settings
from llamasup.core.supervision.backoff import HALF_OPEN_S, RestartPolicy

OptionValues = dict[str, Any]
"""Values by field: keyword arguments."""

# --- single parameters -------------------------------------------------------------------------------

Model = Annotated[
    str,
    argument("MODEL", "A GGUF file, a name of `llamasup list`, org/repo[:quant], an https URL, or 'demo'."),
]
ModelsFolder = Annotated[
    Path | None, option("--folder", "DIR", "The models folder. Default: ~/.local/share/llamasup/models.")
]
_OF_MODELS = "The models"
RUNTIME_METAVAR = "PATH|NAME|embedded"
RUNTIME_HELP = "The llama-server to use: a path, a name on PATH, or embedded. Env: $LLAMASUP_RUNTIME."
RuntimeOption = Annotated[str | None, option("--runtime", RUNTIME_METAVAR, RUNTIME_HELP)]
ConfigFile = Annotated[
    Path | None,
    option(
        "--config",
        "FILE",
        "Config file. Default: $LLAMASUP_CONFIG, ~/.config/llamasup/config.yaml or "
        "/etc/llamasup/config.yaml.",
        rich_help_panel=_OF_MODELS,
    ),
]
WATCH_HELP = "Reload the config when it changes, as with `watch: true`."
Watch = Annotated[bool, flag("--watch", WATCH_HELP, rich_help_panel=_OF_MODELS)]
Json = Annotated[bool, flag("--json", "Print JSON.")]
UsedPid = Annotated[int | None, option("--pid", "PID", "Process ID of the llamasup to use, if several run.")]
UsedUrl = Annotated[str | None, option("--url", "URL", "URL of the llamasup to use. Env: $LLAMASUP_URL.")]
UsedKeyFile = Annotated[
    Path | None, option("--api-key-file", "PATH", "File with the API key. Env: $LLAMASUP_API_KEY.")
]

_OF_ONE_MODEL = ("draft_model", "mmproj")

ACCESS = "Addresses and access"
_LIMITS = "Requests, and the life of llama-server"
_LOGS = "Logs and usage"
_PARENT = "For a program that starts llamasup"

# --- groups ------------------------------------------------------------------------------------------

_INSECURE = switch("--insecure-no-auth", "Accept requests from other machines without an API key.")
_NO_USAGE = switch("--no-usage", "Do not count the usage of models and keys.")

_NO_UI = switch("--no-ui", "Do not serve the web console at /llamasup/.")

_OLLAMA = text(
    "--ollama",
    "[=ADDRESS]",
    "Also serve Ollama's API, at this address; without a value at 127.0.0.1:11434.",
)

# Where ``run`` listens: the fields of RunOptions.
LISTENING = Group(
    in_section(
        ACCESS,
        text("--host", "ADDRESS|PATH,...", "Addresses and Unix sockets (*.sock) to listen on.", "127.0.0.1"),
        number("--port", "N", "Port to listen on; 0 for any free port.", 8080),
        path("--tls-cert", "PEM file with the certificate and its chain, to serve https."),
        path("--tls-key", "PEM file with the private key of the certificate."),
        path("--api-key-file", "File with one API key per line. Env: $LLAMASUP_API_KEY."),
        _NO_UI,
        _OLLAMA,
    ),
)

# For run and wrap: fields of ServiceOptions.
SERVING = Group(
    (
        *in_section(
            ACCESS,
            _INSECURE,
            many(
                "--allow-host",
                "NAME",
                "Accept this name in the Host header, in addition to localhost and the address.",
                field="hosts",
                read=checked(allowed_host),
            ),
            many(
                "--allow-origin",
                "ORIGIN",
                "Allow requests from web pages of this origin, such as http://localhost:3000.",
                field="origins",
                read=checked(allowed_origin),
            ),
            many(
                "--trusted-proxy",
                "ADDRESS",
                "Name clients by X-Forwarded-For of this reverse proxy: an address, a network, or unix.",
                field="trusted_proxies",
                read=of_kind(ProxyAddress()),
            ),
            many(
                "--remote-media",
                "HOST",
                "Let llama-server fetch media from this host for URLs in requests; `any`: from every host.",
                read=checked(allowed_media_host),
            ),
        ),
        *in_section(
            _LIMITS,
            size_limit(
                "--max-body", "The largest body of a request. Default: 100MiB; less if memory is short."
            ),
            setting_option("max_concurrent"),
            setting_option("max_queued"),
            setting_option("wait_timeout_s"),
            time_limit("--request-timeout", "How long a request may take; 0: no limit."),
            switch(
                "--stream-keepalive",
                "Send comments on waiting streams, so that no proxy closes the connection.",
            ),
            setting_option("warm_up"),
            setting_option("continue_streams"),
            setting_option("repair"),
            setting_option("drain_timeout_s"),
            duration("--stop-timeout", "How long llama-server may take to exit before it is killed.", 10.0),
        ),
        *in_section(
            _LOGS,
            _NO_USAGE,
            path("--access-log", "Log each request to this file as a JSON object; - for standard error."),
            time_limit("--slow-request", "Log requests whose answer begins later than this. Default: off."),
        ),
    )
)

# For run and wrap without a service manager: fields of ServiceOptions.
FOREGROUND = Group(
    (
        *in_section(
            _LIMITS,
            switch(
                "--keep-trying",
                "After too many crashes, retry every 5 minutes instead of exiting.",
                field="restart",
                off=RestartPolicy(),
                on=RestartPolicy(half_open_s=HALF_OPEN_S),
            ),
        ),
        *in_section(
            _PARENT,
            path(
                "--ready-file", "Write the address to this file once llamasup is ready; remove it at a stop."
            ),
        ),
    )
)

# Options of serve that replace or extend values of its config.
CONFIG_OVERRIDES = Group(
    (
        *in_section(
            _OF_MODELS,
            many(
                "--models-dir",
                "FOLDER",
                "Serve the models in this folder. With it a config is optional.",
                read=str,
            ),
            path("--token-file", "File with the hub's token. Replaces the config's file."),
        ),
        *in_section(
            ACCESS,
            text(
                "--host",
                "ADDRESS|PATH,...",
                "Addresses and Unix sockets to listen on. Replaces the config's `listen`.",
            ),
            number("--port", "N", "Port to listen on; 0 for any free port. Replaces the config's port."),
            _INSECURE,
            path("--api-key-file", "File with one API key per line. Replaces the config's file."),
            path("--tls-cert", "PEM file with the certificate and its chain. Replaces the config's file."),
            path("--tls-key", "PEM file with the private key of the certificate."),
            _NO_UI,
            _OLLAMA,
        ),
        *in_section(_LOGS, _NO_USAGE),
        *in_section(_PARENT, path("--ready-file", "Write the address to this file once llamasup is ready.")),
    )
)

# The settings that serve takes for all models: fields of ModelSettings.
MODEL_DEFAULTS = Group(
    in_section(
        "Defaults for all models",
        *(
            option
            for part in options_of_a_plan(checked=True)
            for option in part
            if option.field not in _OF_ONE_MODEL
        ),
    )
)

# For a program that starts llamasup: fields of OutputOptions.
PARENT_PROGRAM = Group(
    in_section(
        _PARENT,
        text(
            "--events",
            "jsonl",
            "Write events to standard output, one JSON object per line.",
            read=one_of("jsonl"),
        ),
        switch(
            "--sidecar",
            "Run as part of another program: use any free port, write events to standard output, "
            "and stop when standard input closes.",
        ),
        number("--parent-pid", "PID", "Stop when this process exits."),
    ),
)

# Fields of OutputOptions.
_LEVELS = ("debug", "info", "warning", "error")
LOGGING = Group(
    in_section(
        _LOGS,
        text(
            "--log-level",
            "|".join(_LEVELS),
            "Lowest level of messages to log.",
            "info",
            read=one_of(*_LEVELS),
        ),
        text("--log-format", "text|json", "Format of the log.", "text", read=one_of("text", "json")),
    ),
)

ModelSettings = Annotated[Settings, SETTINGS]
Listening = Annotated[OptionValues, LISTENING]
Serving = Annotated[OptionValues, SERVING]
Foreground = Annotated[OptionValues, FOREGROUND]
ConfigOverrides = Annotated[OptionValues, CONFIG_OVERRIDES]
ModelDefaults = Annotated[OptionValues, MODEL_DEFAULTS]
ParentProgram = Annotated[OptionValues, PARENT_PROGRAM]
Logging = Annotated[OptionValues, LOGGING]

# --- formatted again, for unit files ----------------------------------------------------------------

_RUN_OPTIONS = (*LISTENING.options, *SERVING.options, *LOGGING.options)
# Always written: a unit file also depends on these values, and a later version may change their defaults.
_ALWAYS = ("host", "port", "drain_timeout_s", "stop_timeout_s")


def run_arguments(model: str, settings: Settings, given: Mapping[str, Any], runtime: str) -> list[str]:
    """Format the command line of ``llamasup run`` with these values, without default values.

    ``given`` are the values of ``Listening``, ``Serving`` and ``Logging``.
    """
    values = {option.field: getattr(settings, option.field) for option in SETTINGS.options}
    *options, extra = SETTINGS.options
    return [
        "run",
        model,
        *format_arguments(options, values),
        *format_arguments(_RUN_OPTIONS, given, _ALWAYS),
        "--runtime",
        runtime,
        *format_arguments([extra], values),
    ]


def serve_arguments(config: Path | None, given: Mapping[str, Any], runtime: str | None) -> list[str]:
    """Format the command line of ``llamasup serve`` with these values.

    ``given`` are the values of ``ConfigOverrides`` and ``Logging``, and ``watch``.
    """
    return [
        "serve",
        *([] if config is None else ["--config", str(config)]),
        *(["--watch"] if given["watch"] else []),
        *format_arguments((*CONFIG_OVERRIDES.options, *LOGGING.options), given),
        *([] if runtime is None else ["--runtime", runtime]),
    ]


def was_given(ctx: typer.Context, field: str) -> bool:
    """Whether the option of ``field`` is on the command line or in the environment."""
    source = ctx.get_parameter_source(field)
    return source is not None and source.name != "DEFAULT"
