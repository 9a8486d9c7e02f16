"""``llamasup rm``: removes models from the models folder, with all that came with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from llamasup.cli.errors import guarded
from llamasup.cli.output.results import write_json
from llamasup.cli.output.view import View
from llamasup.downloads.hub_settings import hub_endpoint
from llamasup.errors import UsageInvalid
from llamasup.llama_server.slots.store import sweep_slots
from llamasup.models.removal import Removal, remove, to_remove
from llamasup.system.storage.folders import models_folder
from llamasup.system.storage.paths import expanded
from llamasup.system.text import memory_text, printable

__all__ = ["rm_command"]


def rm_command(names: Sequence[str], *, folder: Path | None, yes: bool, json: bool) -> int:
    """Remove each, once a person has agreed. Nothing is removed unless all of them can be."""

    def act(view: View) -> int:
        top = expanded(folder or models_folder(), UsageInvalid, of="--folder")
        removals = to_remove(names, top, hub_endpoint(os.environ))
        for removal in removals:
            _refuse_loaded(removal)
        for removal in removals:
            size = memory_text(removal.size_bytes)
            view.say("info", "rm", f"{removal.name}: {_names(removal, top)} ({size})")
        if not yes and not _agreed(removals, view):
            view.say("info", "rm", "Nothing is removed.")
            return 1
        freed = sum(removal.size_bytes for removal in removals)
        for removal in removals:
            remove(removal, top)
            view.say("info", "rm", f"Removed {_names(removal, top)}.")
        sweep_slots()  # deletes the kept conversations of these models
        if json:
            paths = [str(path) for removal in removals for path in (*removal.files, *removal.downloads)]
            write_json({"removed": paths, "freed_bytes": freed})
        view.say("info", "rm", f"Freed {memory_text(freed)}.")
        return 0

    return guarded(act)


def _names(removal: Removal, folder: Path) -> str:
    """The files that are removed, relative to the models ``folder``; without llamasup's own records."""
    shown = (*removal.files, *removal.downloads) or removal.leftovers
    return ", ".join(_name(each, folder) for each in shown)


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _agreed(removals: Sequence[Removal], view: View) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageInvalid(
            f"Nobody is there to agree to the removal of {len(removals)} model{'s' * (len(removals) > 1)}.",
            remedy="Add --yes.",
        )
    view.say("info", "rm", "Remove? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _refuse_loaded(removal: Removal) -> None:
    """Raises UsageInvalid where a process of this user was started with one of the files."""
    files = {str(each.resolve()) for each in removal.files}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        # llama-server has the path behind a flag; whoever looks at the file has it as an argument too.
        named = [word for flag, word in pairwise(words) if flag.startswith("-")]
        paths = (path for word in named for path in (word, *_adapters(word)))
        models = [path for path in paths if path.lower().endswith(".gguf")]
        if models and not files.isdisjoint(_real_paths(models, process)):
            raise UsageInvalid(
                f"{printable(removal.name)} is loaded by process {process.pid}.",
                remedy="Unload it first (llamasup unload), or stop what serves it.",
            )


def _adapters(word: str) -> list[str]:
    """The paths in an argument such as ``a.gguf:0.5,b.gguf:0``, llama-server's syntax for adapters."""
    return [each.rpartition(":")[0] or each for each in word.split(",")]


def _real_paths(paths: Sequence[str], process: psutil.Process) -> Iterator[str]:
    """Of what ``process`` was given, wherever it was started."""
    try:
        folder = process.cwd()
    except psutil.Error:  # another user's, or it has ended
        folder = "/"
    return (os.path.realpath(os.path.join(folder, path)) for path in paths)  # noqa: PTH118 - text, as given
