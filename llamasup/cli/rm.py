"""``llamasup rm``: removes models from the models folder, with all that came with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from llamasup.cli.errors import guarded
from llamasup.cli.results import write_json
from llamasup.cli.view import View
from llamasup.core.errors import UsageInvalid
from llamasup.core.printable import printable
from llamasup.core.units import memory_text
from llamasup.effects.files import models_folder
from llamasup.effects.given_paths import expanded
from llamasup.effects.hub_settings import hub_endpoint
from llamasup.effects.model_store import Removal, remove, to_remove
from llamasup.effects.slot_store import sweep_slots

__all__ = ["rm_command"]


def rm_command(names: Sequence[str], *, folder: Path | None, yes: bool, json: bool) -> int:
    """Remove each, once a person has agreed. Nothing is removed unless all of them can be."""

    def act(view: View) -> int:
        top = expanded(folder or models_folder(), UsageInvalid, of="--folder")
        removals = to_remove(names, top, hub_endpoint(os.environ))
        for removal in removals:
            _refuse_loaded(removal)
        for removal in removals:
            files = ", ".join(each.name for each in removal.files) or "what an unfinished download left"
            view.say("info", "rm", f"{removal.name}: {files} ({memory_text(removal.size_bytes)})")
        if not yes and not _agreed(removals, view):
            view.say("info", "rm", "Nothing is removed.")
            return 1
        freed = sum(removal.size_bytes for removal in removals)
        for removal in removals:
            remove(removal, top)
        sweep_slots()  # what was said to them goes with them
        if json:
            paths = [str(path) for removal in removals for path in removal.files]
            write_json({"removed": paths, "freed_bytes": freed})
        view.say("info", "rm", f"Removed; {memory_text(freed)} are free again.")
        return 0

    return guarded(act)


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
        named = [path for flag, path in pairwise(words) if flag.startswith("-")]
        models = [path for path in named if path.lower().endswith(".gguf")]
        if models and not files.isdisjoint(_real_paths(models, process)):
            raise UsageInvalid(
                f"{printable(removal.name)} is loaded by process {process.pid}.",
                remedy="Unload it first (llamasup unload), or stop what serves it.",
            )


def _real_paths(paths: Sequence[str], process: psutil.Process) -> Iterator[str]:
    """Of what ``process`` was given, wherever it was started."""
    try:
        folder = process.cwd()
    except psutil.Error:  # another user's, or it has ended
        folder = "/"
    return (os.path.realpath(os.path.join(folder, path)) for path in paths)  # noqa: PTH118 - text, as given
