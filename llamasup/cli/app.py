"""The table of commands. A command's module is imported when the command runs or shows its help.

A command returns its exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from llamasup._version import __version__
from llamasup.cli.command_group import LazyCommand, LazyGroup
from llamasup.cli.garbage import collect_again

__all__ = ["COMMANDS", "app"]


def _command(name: str, summary: str, *, module: str | None = None) -> LazyCommand:
    return LazyCommand(name, f"llamasup.cli.commands.{module or name}", summary)


def _control(name: str, summary: str) -> LazyCommand:
    return _command(name, summary, module="control")


COMMANDS: Final[Mapping[str, Sequence[LazyCommand]]] = {
    "Commands to serve models": (
        _command("run", "Serve one model in the foreground."),
        _command("serve", "Serve many models, from a config or from folders."),
        _command("rpc-worker", "Lend the memory of this machine to another llamasup.", module="rpc_worker"),
        _command("wrap", "Supervise an existing llama-server command line, unchanged."),
    ),
    "Commands to manage models": (
        _command("pull", "Download models from Hugging Face or from an https URL."),
        _command("rm", "Delete models from the models folder."),
        _command("list", "List the models on this machine by name."),
        _command("inspect", "Show facts about a model, and whether it fits in memory."),
    ),
    "Commands for a running llamasup": (
        _control("status", "Show the state of a running llamasup and its models."),
        _command("top", "Show the models and the requests of a running llamasup, live."),
        _command("ui", "Open the web console of a running llamasup."),
        _control("ps", "List the models of a running llamasup."),
        _control("why", "Say why a model is in its state, and what would have to change."),
        _control("load", "Load a model, and wait until it is ready."),
        _control("unload", "Unload a model, and wait until its memory is free."),
        _control("restart", "Restart one model, or all loaded models one by one."),
        _control("reload", "Read the configuration again."),
        _command("upgrade", "Move to another build of llama.cpp once it is proven."),
        _control("stop", "Stop a running llamasup."),
        _control("logs", "Show the llama-server log of a model."),
        _command("connect", "Show the settings of a client for a running llamasup."),
        _command("usage", "Show the requests and tokens of each model, key and day."),
        _command("batch", "Run the requests of a file, and continue after interruptions."),
    ),
    "Commands to explain and diagnose": (
        _command("plan", "Show the llama-server command line for a model, with reasons."),
        _command("tune", "Measure which flags make a model better here, and keep them."),
        _command("doctor", "Check this machine for problems, and show a remedy for each."),
    ),
    "Commands for services, keys and configuration": (
        _command("service", "Run llamasup as a systemd service."),
        _command("key", "Create, list and revoke API keys."),
        _command("config", "Write and check the configuration file of serve."),
    ),
}
"""By the sections of ``llamasup --help``."""


_SERVERS = ("run", "serve", "rpc-worker", "wrap")  # they collect later (cli/foreground.py)


class _Root(LazyGroup):
    table = COMMANDS


def _exit(exit_code: int, version: bool) -> None:
    sys.exit(exit_code)


app = typer.Typer(
    cls=_Root,
    result_callback=_exit,
    name="llamasup",
    help="Supervise llama.cpp's llama-server: choose its flags, check its start, restart it after a crash.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the import of rich takes longer than the rest of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"llamasup {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand not in _SERVERS:
        collect_again()
