"""The table of commands. A command's module is imported when the command runs or shows its help.

A command returns its exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from typer._click.exceptions import NoSuchOption, UsageError

from llamasup._version import __version__
from llamasup.cli.command_group import COMPLETION_VARIABLE, CommandGroup, LazyGroup
from llamasup.cli.gc_pause import collect_again
from llamasup.features import FEATURES, CommandEntry


def _core(name: str, summary: str, module: str = "") -> CommandEntry:
    return CommandEntry(name, f"llamasup.cli.commands.{module or name}", summary)


_CORE: Final = (
    _core("run", "Serve one model in the foreground."),
    _core("serve", "Serve many models, from a config or from folders."),
    _core("rpc-worker", "Lend the memory of this machine to another llamasup.", "rpc_worker"),
    _core("rm", "Delete models from the models folder.", "models"),
    _core("list", "List the models on this machine by name.", "models"),
    _core("status", "Show the state of a running llamasup and its models.", "control"),
    _core("top", "Show the models and the requests of a running llamasup, live."),
    _core("ps", "List the models of each running llamasup.", "control"),
    _core("why", "Explain why a model is in its state, and what would change it.", "control"),
    _core("load", "Load a model, and wait until it is ready.", "control"),
    _core("unload", "Unload a model, and wait until its memory is free.", "control"),
    _core("restart", "Restart one model, or all loaded models one by one.", "control"),
    _core("reload", "Read the configuration again.", "control"),
    _core("stop", "Stop a running llamasup.", "control"),
    _core("logs", "Show the log of a model's llama-server, or of llamasup.", "control"),
    _core("plan", "Show the llama-server command line for a model, with reasons."),
    _core("fleet", "Deploy models on a Ray cluster."),
    _core("key", "Create, list and revoke API keys."),
    _core("config", "Write and check the configuration file of serve."),
    _core("completion", "Print the script that completes commands and options in a shell."),
    _core("help", "Show the help of a command, or a page of the documentation."),
)

_SECTIONS: Final = {
    "Commands to serve models": "run serve rpc-worker wrap",
    "Commands to manage models": "pull rm list inspect",
    "Commands for a running llamasup": "status top ui ps why load unload restart reload upgrade stop logs"
    " chat connect launch usage batch",
    "Commands to explain and diagnose": "plan tune doctor",
    "Commands for services, keys and configuration": "runtime service fleet key config completion help",
}
"""The order of ``llamasup --help``. A name without a command is that of a feature that is not here."""


def _commands() -> dict[str, Sequence[CommandEntry]]:
    features = (entry for feature in FEATURES for entry in feature.entries)
    known = {entry.name: entry for entry in (*_CORE, *features)}
    return {
        title: [known[name] for name in names.split() if name in known] for title, names in _SECTIONS.items()
    }


COMMANDS: Final[Mapping[str, Sequence[CommandEntry]]] = _commands()
"""By the sections of ``llamasup --help``."""


_SERVERS = ("run", "serve", "rpc-worker", "wrap")  # they collect later (cli/foreground.py)


class _Root(LazyGroup):
    table = COMMANDS

    def invoke(self, ctx: Any) -> Any:
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _add_hint(error, words)
            _report_to_parent(words, error)
            raise

    def _main_shell_completion(self, ctx_args: Any, prog_name: str, complete_var: str | None = None) -> None:
        if os.environ.get(COMPLETION_VARIABLE):
            from typer._completion_classes import completion_init

            completion_init()  # Typer does it only for a root with --install-completion
        super()._main_shell_completion(ctx_args, prog_name, COMPLETION_VARIABLE)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            _add_hint(error, words)
            raise


def _add_hint(error: UsageError, words: Sequence[str]) -> None:
    """Say what to write instead, also for the words of other programs."""
    from llamasup.cli.hints import command_hint, option_hint, surplus_hint, typed  # only after a mistake

    command = error.ctx.command if error.ctx is not None else None
    if command is None:
        return
    root = command if isinstance(command, _Root) else None
    name = command.name or "" if root is None else ""
    if isinstance(error, NoSuchOption):
        options = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
        passes_on = any(parameter.name == "extra" for parameter in command.params)
        hint = option_hint(error.option_name, words, name, options, passes_on=passes_on)
        error.message, error.possibilities = f"No such option: {typed(error.option_name, words)[0]}", None
    elif isinstance(command, CommandGroup) and error.message.startswith("No such command"):
        word = error.message.partition("'")[2].partition("'")[0] if root is None else words[0]
        error.message = f"No such command {word!r}"
        hint = command_hint(word, command.commands, name)
    elif error.message.startswith("Got unexpected extra argument"):
        surplus = error.message.partition("(s) (")[2].removesuffix(")")
        error.message = f"Unexpected argument: {surplus}"
        hint = surplus_hint(
            max((word for word in words if f"{surplus} ".startswith(f"{word} ")), key=len, default=surplus),
            name,
        )
    else:
        return
    error.message = f"{error.message.rstrip('.')}. {hint}".rstrip()


def _report_to_parent(words: Sequence[str], error: UsageError) -> None:
    """Report a wrong option also to a parent program that reads events."""
    options = words[: words.index("--")] if "--" in words else words
    if "--sidecar" in options or "--events=jsonl" in "\0".join(options).replace("--events\0", "--events="):
        from llamasup.cli.foreground import EventLines
        from llamasup.cli.output.nonblocking_writer import OutputWriter
        from llamasup.errors import UsageInvalid

        stdout = OutputWriter(sys.stdout)
        command = error.ctx.command_path if error.ctx else "llamasup"
        EventLines(stdout).end(UsageInvalid(error.format_message(), remedy=f"See {command} --help."))
        stdout.close()


def _exit(exit_code: int, version: bool) -> None:
    sys.exit(exit_code)


app = typer.Typer(
    cls=_Root,
    result_callback=_exit,
    name="llamasup",
    help="Supervise llama.cpp's llama-server: choose its flags, check its start, restart it after a crash.",
    epilog="Begin with docs/get-started.md: llamasup help get-started.md",
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
