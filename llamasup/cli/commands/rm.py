"""``llamasup rm``: deletes models from the models folder, with all their files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json
from llamasup.cli.output.view import View, plural
from llamasup.downloads.hub_settings import hub_endpoint
from llamasup.errors import UsageInvalid
from llamasup.llama_server.slots.store import sweep_slots
from llamasup.models.removal import Removal, remove, to_remove
from llamasup.system.storage.folders import models_folder
from llamasup.system.storage.paths import expanded
from llamasup.system.text import memory_text, printable

if TYPE_CHECKING:
    import psutil

__all__ = ["commands", "rm"]

commands = command_set()

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="org/repo[:QUANT], a URL, or a file in the models folder.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]


@commands.command()
def rm(models: Models, *, folder: o.ModelsFolder = None, yes: Yes = False, json: o.Json = False) -> int:
    """Delete models from the models folder.

    The command deletes every part of a model, its projector, and the files of unfinished downloads. If one
    model cannot be deleted, none is.
    """

    def act(view: View) -> int:
        top = expanded(folder or models_folder(), UsageInvalid, of="--folder")
        removals = to_remove(models, top, hub_endpoint(os.environ))
        for removal in removals:
            _refuse_loaded(removal)
        for removal in removals:
            size = memory_text(removal.size_bytes)
            view.say("info", "rm", f"{removal.name}: {_names(removal, top)} ({size})")
        if not yes and not _is_confirmed(removals, view):
            view.say("info", "rm", "Nothing was deleted.")
            return 1
        freed = sum(removal.size_bytes for removal in removals)
        for removal in removals:
            remove(removal, top)
            view.say("info", "rm", f"Deleted {_names(removal, top)}.")
        sweep_slots()  # deletes the saved slots of these models
        if json:
            paths = [str(path) for removal in removals for path in (*removal.files, *removal.downloads)]
            write_json({"removed": paths, "freed_bytes": freed})
        view.say("info", "rm", f"Freed {memory_text(freed)}.")
        return 0

    return guarded(act)


def _names(removal: Removal, folder: Path) -> str:
    """The files to remove, relative to the models ``folder``; without llamasup's own records."""
    paths = (*removal.files, *removal.downloads) or removal.leftovers
    return ", ".join(str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in paths)


def _is_confirmed(removals: Sequence[Removal], view: View) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageInvalid(
            f"Deleting {plural(len(removals), 'model')} needs confirmation, but there is no terminal.",
            remedy="Add --yes to delete without asking.",
        )
    view.say("info", "rm", "Delete? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _refuse_loaded(removal: Removal) -> None:
    """Raises UsageInvalid if a process of this user was started with one of the files."""
    import psutil

    files = {str(file.resolve()) for file in removal.files}
    for process in psutil.process_iter(["cmdline"]):
        command_line = process.info["cmdline"] or ()
        # llama-server has the path after a flag; a program that only reads the file has it as an argument.
        values = [value for flag, value in pairwise(command_line) if flag.startswith("-")]
        paths = (path for value in values for path in (value, *_adapters(value)))
        models = [path for path in paths if path.lower().endswith(".gguf")]
        if models and not files.isdisjoint(_real_paths(models, process)):
            raise UsageInvalid(
                f"{printable(removal.name)} is loaded by process {process.pid}.",
                remedy="Unload it first (llamasup unload MODEL), or stop that process.",
            )


def _adapters(value: str) -> list[str]:
    """The paths in an argument such as ``a.gguf:0.5,b.gguf:0``, llama-server's syntax for adapters."""
    return [adapter.rpartition(":")[0] or adapter for adapter in value.split(",")]


def _real_paths(paths: Sequence[str], process: psutil.Process) -> Iterator[str]:
    """The paths, relative to the working directory of ``process``."""
    import psutil

    try:
        folder = process.cwd()
    except psutil.Error:  # another user's process, or an ended one
        folder = "/"
    return (os.path.realpath(os.path.join(folder, path)) for path in paths)  # noqa: PTH118 - text, as given
