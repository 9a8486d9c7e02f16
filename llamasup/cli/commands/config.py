"""``llamasup config …``: writes a config, checks one, and prints the schema of one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View, plural
from llamasup.errors import ConfigInvalid, LlamasupError, OutputFailed, UsageInvalid
from llamasup.models.names import is_pattern
from llamasup.system.storage.folders import atomic_write, file_id, models_folder
from llamasup.system.text import path_text, printable

if TYPE_CHECKING:
    from llamasup.config.issues import Issue
    from llamasup.config.starter import GenerationContext
    from llamasup.config.values import Config

__all__ = ["check", "commands", "init", "schema"]

commands = command_set("config", "Write and check the configuration file of serve.")

_STANDARD_OUTPUT = Path("-")
# Where people keep models, LM Studio's folder among them.
_USUAL_FOLDERS = ("~/models", "~/Models", "~/.lmstudio/models", "/srv/models", "/models")

ConfigFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="Default: $LLAMASUP_CONFIG, ~/.config/llamasup/config.yaml or /etc/llamasup/config.yaml.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="PATH",
        help="The file to write; - for standard output. Default: ~/.config/llamasup/config.yaml.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


@commands.command()
def init(output: Output = None, force: Force = False) -> int:
    """Write a commented config for this machine."""
    from llamasup.config.sources import own_config
    from llamasup.config.starter import starter_text

    def act(view: View) -> None:
        text = starter_text(_surroundings(os.environ))
        if output == _STANDARD_OUTPUT:
            write_result(text.rstrip("\n"))
            return
        path = _written(output or own_config(os.environ), text, force=force)
        view.say("info", "config", f"Wrote {printable(str(path))}")
        view.say("info", "config", f"  → Check it: llamasup config check {shlex.quote(str(path))}")

    return guarded(act)


@commands.command()
def check(file: ConfigFile = None, json: o.Json = False) -> int:
    """Show every mistake in a config, and every missing file that it names.

    The command starts nothing.
    """

    from llamasup.cli.commands.config_check import missing_here, wrong_here
    from llamasup.config.issues import ConfigIssues, Issue
    from llamasup.config.reading import read
    from llamasup.config.sources import find_config

    def act(view: View) -> int:
        path = find_config(file, os.environ)
        try:
            reading, issues = read(path, os.environ)
            untold = ""
            if not issues:  # an unreadable value has its default: checking models with it would mislead
                issues = missing_here(reading, os.environ)
                wrong, untold = wrong_here(reading, os.environ, issues)
                issues += wrong
            else:
                issues += missing_here(reading, os.environ)
            if issues:
                raise ConfigIssues(str(path), issues)
        except ConfigInvalid as error:
            if not json:
                raise
            found = error.issues if isinstance(error, ConfigIssues) else (Issue(0, "", error.message),)
            write_json(
                {"ok": False, "file": path_text(str(path)), "mistakes": [_as_json(each) for each in found]}
            )
            return error.exit_code
        if json:
            write_json({"ok": True, "file": path_text(str(path)), "mistakes": []})
        else:
            view.say("info", "config", f"{printable(str(path))} is valid: {_summary(reading.config)}.")
            if untold:
                view.say("info", "config", f"The models were not checked: {untold}")
        return 0

    return guarded(act)


@commands.command()
def schema() -> int:
    """Print the JSON Schema of a config, for editors."""
    from llamasup.config.schema import json_schema

    def act(view: View) -> None:
        write_json(json_schema())

    return guarded(act)


def _as_json(issue: Issue) -> Mapping[str, object]:
    return {"line": issue.line or None, "key": issue.key, "message": issue.what}


def _summary(config: Config) -> str:
    named = sum(not is_pattern(name) for name in config.models)
    parts = (
        (named, "model"),
        (len(config.models) - named, "rule"),
        (len(config.models_dir), "folder"),
        (len(config.caches), "cache"),
    )
    return ", ".join(plural(count, noun) for count, noun in parts if count) or "downloads on demand"


def _written(path: Path, text: str, *, force: bool) -> Path:
    try:
        path = path.expanduser().absolute()
        if path.is_dir():
            raise UsageInvalid(f"--output {str(path)!r} is a folder.", remedy="Give the path of a file.")
        if path.exists() and not force:
            raise UsageInvalid(
                f"{str(path)!r} already exists.",
                remedy="Give another --output, or overwrite the file with --force.",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode(), mode=0o644)
    except RuntimeError:  # ~name
        raise UsageInvalid(f"--output {str(path)!r}: no such user.") from None
    except OSError as error:
        raise OutputFailed(f"Cannot write the config to {str(path)!r}: {error.strerror or error}.") from None
    return path


# --- this machine ------------------------------------------------------------------------------------


def _surroundings(environ: Mapping[str, str]) -> GenerationContext:
    from llamasup.auth.key_store import default_key_file
    from llamasup.config.starter import GenerationContext
    from llamasup.config.values import Cache
    from llamasup.llama_server.inspect import find_runtime
    from llamasup.models.search import cache_folders
    from llamasup.system.hardware.probe import hardware

    machine = hardware()
    runtime, devices = None, []
    try:
        found = find_runtime(None, environ)
    except LlamasupError:  # init also works on a machine without a runtime
        pass
    else:
        runtime = f"{found.path} ({found.version})"
        devices = [(device.name, device.description) for device in found.capabilities.devices]
    keys = default_key_file()
    return GenerationContext(
        ram_bytes=machine.memory_total_bytes,
        cores=machine.physical_cores,
        devices=devices,
        runtime=runtime,
        # llamasup's own folder first: downloads go to the first one.
        models_dirs=_folders((*_ours(models_folder()), *_USUAL_FOLDERS)),
        caches=tuple(name for name in get_args(Cache) if cache_folders((name,), environ)),
        # A config is UTF-8; a path with other bytes cannot be written there.
        key_file=str(keys) if keys.is_file() and path_text(str(keys)) == str(keys) else None,
    )


def _ours(folder: Path) -> tuple[str, ...]:
    """``folder`` if it can be written in a config: a path with bytes other than UTF-8 cannot."""
    return (str(folder),) if path_text(str(folder)) == str(folder) else ()


def _folders(usual: Sequence[str]) -> tuple[str, ...]:
    """The existing folders as written; one spelling for each, if the file system ignores case."""
    found: dict[tuple[int, int], str] = {}
    for name in usual:
        with suppress(RuntimeError):  # ~name
            if (folder := file_id(Path(name).expanduser(), follow=True)) is not None:
                found.setdefault(folder, name)
    return tuple(found.values())
