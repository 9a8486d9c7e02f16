"""Deletes models from the models folder, with all their files (``llamasup rm``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from llamasup.cli.command_group import argument, command_set, flag
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json
from llamasup.cli.output.view import View, plural
from llamasup.core.hub.hub_settings import hub_endpoint
from llamasup.core.llama_server.slots.store import sweep_slots
from llamasup.core.models.removal import Removal, refuse_loaded, remove, to_remove
from llamasup.core.system.storage.folders import models_folder
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import memory_text
from llamasup.errors import UsageInvalid

commands = command_set()

Models = Annotated[
    list[str],
    argument(
        "MODEL...", "A name of `llamasup list`, org/repo[:QUANT], a URL, or a file in the models folder."
    ),
]
Yes = Annotated[bool, flag("--yes -y", "Delete without asking.")]


@commands.command()
@guarded
def rm(
    view: View, models: Models, *, folder: o.ModelsFolder = None, yes: Yes = False, json: o.Json = False
) -> int:
    """Delete models from the models folder.

    The command deletes every part of a model, its projector, and the files of unfinished downloads. If one
    model cannot be deleted, none is.
    """
    top = expanded(folder or models_folder(), UsageInvalid, of="--folder")
    removals = to_remove(models, top, hub_endpoint(os.environ))
    for removal in removals:
        refuse_loaded(removal)
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


def _names(removal: Removal, folder: Path) -> str:
    """List the files to remove, relative to the models ``folder``; without llamasup's own records."""
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
