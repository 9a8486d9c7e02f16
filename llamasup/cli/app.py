"""The commands and their options. What a command does is imported when it runs: ``--help`` must be quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamasup._version import __version__
from llamasup.cli.commands.config_declared import config
from llamasup.cli.commands.control_declared import add_control_commands
from llamasup.cli.commands.key_declared import key
from llamasup.cli.commands.pull_declared import pull, rm
from llamasup.cli.commands.service_declared import service
from llamasup.cli.options import shared as o
from llamasup.cli.options.groups import takes_groups
from llamasup.cli.options.model import WithExtra

__all__ = ["app"]

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
app.add_typer(key)
app.command()(pull)
app.command()(rm)
app.add_typer(config)


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
@takes_groups
def run(
    ctx: typer.Context,
    model: o.Model,
    *,
    listening: o.Listening,
    runtime: o.RuntimeOption = None,
    settings: o.ModelSettings,
    serving: o.Serving,
    foreground: o.Foreground,
    attached: o.Attached,
    logging: o.Logging,
) -> None:
    """Serve one model in the foreground."""
    from llamasup.cli.commands.run import OutputOptions, run_command

    if attached["sidecar"] and not o.was_given(ctx, "port"):
        listening["port"] = 0
    output = OutputOptions(**attached, **logging)
    sys.exit(
        run_command(
            model, settings, output, began_s=ctx.obj, runtime=runtime, **listening, **serving, **foreground
        )
    )


@app.command(context_settings={"allow_interspersed_args": False})
@takes_groups
def wrap(
    ctx: typer.Context,
    command: o.Command,
    *,
    strict: o.Strict = False,
    serving: o.Serving,
    foreground: o.Foreground,
    attached: o.Attached,
    logging: o.Logging,
    server_log: o.ServerLog = "stderr",
) -> None:
    """Supervise an existing llama-server command line, unchanged.

    Its address, its keys and TLS are llama-server's own flags: --host, --api-key-file, --ssl-cert-file.
    """
    from llamasup.cli.commands.run import OutputOptions
    from llamasup.cli.commands.wrap import wrap_command

    sys.exit(
        wrap_command(
            command,
            OutputOptions(**attached, **logging, server_log=server_log),
            began_s=ctx.obj,
            strict=strict,
            waits_for_first_load=o.was_given(ctx, "wait_timeout_s"),
            **serving,
            **foreground,
        )
    )


@app.command()
@takes_groups
def serve(
    ctx: typer.Context,
    *,
    config: o.ConfigFile = None,
    watch: o.Watch = False,
    beside: o.BesideConfig,
    runtime: o.RuntimeOption = None,
    attached: o.Attached,
    logging: o.Logging,
) -> None:
    """Serve many models: those of a config, and those that lie in folders."""
    from llamasup.cli.commands.run import OutputOptions
    from llamasup.cli.commands.serve import serve_models

    output = OutputOptions(**attached, **logging)
    if attached["sidecar"] and beside["port"] is None:
        beside["port"] = 0
    sys.exit(serve_models(config, output, began_s=ctx.obj, watch=watch, runtime=runtime, **beside))


@app.command(cls=WithExtra)
@takes_groups
def plan(
    ctx: typer.Context,
    model: o.Model,
    settings: o.ModelSettings,
    runtime: o.RuntimeOption = None,
    json: o.Json = False,
) -> None:
    """Show the command line that run would start, with a reason for every flag; start nothing."""
    from llamasup.cli.commands.plan import plan_command

    sys.exit(plan_command(model, settings, runtime=runtime, json=json))


@app.command()
def inspect(models: o.ModelsOrFolders, json: o.Json = False) -> None:
    """Show what a model is, what it takes and whether it fits here; of a folder, every model in it."""
    from llamasup.cli.commands.inspect import inspect_command

    sys.exit(inspect_command(models, json=json))


@app.command("list")
def list_models(folders: o.Folders = None, json: o.Json = False) -> None:
    """List the models that are here, by name; without folders, those that were downloaded."""
    from llamasup.cli.commands.list import list_command

    sys.exit(list_command(folders or [], json=json))


@app.command()
def doctor(
    model: o.ModelToCheck = None,
    runtime: o.RuntimeOption = None,
    port: o.Port = 8080,
    tls_cert: o.CertificateToCheck = None,
    json: o.Json = False,
) -> None:
    """Look at runtime, devices, memory, limits and folders, and say what hurts and what to do about it."""
    from llamasup.cli.commands.doctor import doctor_command

    sys.exit(doctor_command(model, runtime=runtime, port=port, json=json, tls_cert=tls_cert))


add_control_commands(app)
