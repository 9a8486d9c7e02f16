"""The commands and their options. What a command does is imported when it runs: ``--help`` must be quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamasup import __version__
from llamasup.cli import options as o
from llamasup.cli.model_options import WithExtra, takes_model_options
from llamasup.cli.service_commands import service
from llamasup.core.settings import Settings

__all__ = ["app"]


_NO_SETTINGS = Settings()

app = typer.Typer(
    name="llamasup",
    help="Keeps llama.cpp's llama-server running: right flags, proven start, honest end.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else that --help needs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


app.add_typer(service)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llamasup {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=WithExtra)
@takes_model_options
def run(
    ctx: typer.Context,
    model: o.Model,
    host: o.Host = "127.0.0.1",
    port: o.Port = 8080,
    api_key_file: o.ApiKeyFile = None,
    insecure_no_auth: o.InsecureNoAuth = False,
    runtime: o.RuntimeOption = None,
    settings: Settings = _NO_SETTINGS,
    no_warmup: o.NoWarmup = False,
    wait_timeout: o.WaitTimeout = 120.0,
    drain_timeout: o.DrainTimeout = 30.0,
    stop_timeout: o.StopTimeout = 10.0,
    keep_trying: o.KeepTrying = False,
    ready_file: o.ReadyFile = None,
    events: o.Events = None,
    sidecar: o.Sidecar = False,
    parent_pid: o.ParentPid = None,
    log_level: o.LogLevel = "info",
    log_format: o.LogFormat = "text",
) -> None:
    """Serve one model in the foreground."""
    from llamasup.cli.run import OutputOptions, run_command
    from llamasup.core.backoff import HALF_OPEN_S, RestartPolicy

    output = OutputOptions(events, log_level, log_format, sidecar=sidecar, parent_pid=parent_pid)
    if sidecar and not o.was_given(ctx, "port"):
        port = 0
    sys.exit(
        run_command(
            model,
            settings,
            output,
            began_s=ctx.obj,
            host=host,
            port=port,
            runtime=runtime,
            api_key_file=api_key_file,
            insecure_no_auth=insecure_no_auth,
            warm_up=not no_warmup,
            wait_timeout_s=wait_timeout,
            drain_timeout_s=drain_timeout,
            stop_timeout_s=stop_timeout,
            restart=RestartPolicy(half_open_s=HALF_OPEN_S if keep_trying else None),
            ready_file=ready_file,
        )
    )


@app.command(context_settings={"allow_interspersed_args": False})
def wrap(
    ctx: typer.Context,
    command: o.Command,
    strict: o.Strict = False,
    insecure_no_auth: o.InsecureNoAuth = False,
    no_warmup: o.NoWarmup = False,
    wait_timeout: o.WaitTimeout = 120.0,
    drain_timeout: o.DrainTimeout = 30.0,
    stop_timeout: o.StopTimeout = 10.0,
    keep_trying: o.KeepTrying = False,
    ready_file: o.ReadyFile = None,
    events: o.Events = None,
    sidecar: o.Sidecar = False,
    parent_pid: o.ParentPid = None,
    server_log: o.ServerLog = "stderr",
    log_level: o.LogLevel = "info",
    log_format: o.LogFormat = "text",
) -> None:
    """Supervise an existing llama-server command line, unchanged."""
    from llamasup.cli.run import OutputOptions
    from llamasup.cli.wrap import wrap_command
    from llamasup.core.backoff import HALF_OPEN_S, RestartPolicy

    sys.exit(
        wrap_command(
            command,
            OutputOptions(
                events,
                log_level,
                log_format,
                sidecar=sidecar,
                parent_pid=parent_pid,
                server_log=server_log,
            ),
            began_s=ctx.obj,
            strict=strict,
            insecure_no_auth=insecure_no_auth,
            warm_up=not no_warmup,
            wait_timeout_s=wait_timeout,
            waits_for_first_load=o.was_given(ctx, "wait_timeout"),
            drain_timeout_s=drain_timeout,
            stop_timeout_s=stop_timeout,
            restart=RestartPolicy(half_open_s=HALF_OPEN_S if keep_trying else None),
            ready_file=ready_file,
        )
    )


@app.command(cls=WithExtra)
@takes_model_options
def plan(
    ctx: typer.Context,
    model: o.Model,
    runtime: o.RuntimeOption = None,
    settings: Settings = _NO_SETTINGS,
    json: o.Json = False,
) -> None:
    """Show the command line that run would start, with a reason for every flag; start nothing."""
    from llamasup.cli.plan import plan_command

    sys.exit(plan_command(model, settings, runtime=runtime, json=json))


@app.command()
def inspect(models: o.ModelsOrFolders, json: o.Json = False) -> None:
    """Show what a model is, what it takes and whether it fits here; of a folder, every model in it."""
    from llamasup.cli.inspect import inspect_command

    sys.exit(inspect_command(models, json=json))


@app.command()
def doctor(
    model: o.ModelToCheck = None,
    runtime: o.RuntimeOption = None,
    port: o.Port = 8080,
    json: o.Json = False,
) -> None:
    """Look at runtime, devices, memory, limits and folders, and say what hurts and what to do about it."""
    from llamasup.cli.doctor import doctor_command

    sys.exit(doctor_command(model, runtime=runtime, port=port, json=json))
