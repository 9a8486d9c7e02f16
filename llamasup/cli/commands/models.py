"""Lists the models on this machine by the names that clients use, and deletes them (``list`` and ``rm``)."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

from llamasup.cli.command_group import argument, command_set, flag
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import error_text, guarded, show_error
from llamasup.cli.output.layout import stdout_columns, table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View, plural
from llamasup.core.gguf.facts import ModelFacts, is_served
from llamasup.core.hub.store import hub_endpoint
from llamasup.core.llama_server.slots.store import sweep_slots
from llamasup.core.models.access import output_modalities, resolved
from llamasup.core.models.by_name import default_folders
from llamasup.core.models.found import Attachments, FoundModel
from llamasup.core.models.registry import Registry, build
from llamasup.core.models.removal import Removal, refuse_loaded, remove, to_remove
from llamasup.core.models.rules import Problem
from llamasup.core.models.search import Search, search_models
from llamasup.core.models.spec import ModelSpec
from llamasup.core.system.storage.folders import models_folder
from llamasup.core.system.storage.paths import PathKind, expanded, path_kind
from llamasup.core.system.text import memory_text, path_text, printable
from llamasup.errors import LlamasupError, ModelMissing, UsageInvalid

commands = command_set()

Folders = Annotated[
    list[str] | None,
    argument(
        "FOLDER...",
        "Folders with models. Default: llamasup's own and the caches of Hugging Face and llama.cpp.",
    ),
]


All = Annotated[bool, flag("--all", "Also list broken files, and files that are no models.")]


@commands.command("list")
@guarded
def list_models(view: View, folders: Folders = None, all_: All = False, json: o.Json = False) -> int:
    """List the models on this machine by name.

    If a folder cannot be read, the models of the other folders are still listed.
    """
    paths = tuple(map(expanded, folders)) if folders else default_folders()
    errors = {path: error for path in paths if (error := _file_error(path)) is not None}
    search = search_models([path for path in paths if path not in errors])
    errors |= {Path(path): error for path, error in search.missing.items()}
    registry = build((), search.found)
    specs = [spec for spec in registry.specs.values() if all_ or not spec.unlisted]
    others = [file for file in search.found if _is_other(file)] if all_ else []
    if json:
        write_json(_as_json(specs, others, registry, search, paths))
    else:
        if specs or others:
            write_result(_as_text(specs, others, Attachments.among(search.found)))
        elif len(errors) < len(paths) or not paths:
            shown = ", ".join(printable(str(path)) for path in paths)
            text = f"llamasup: no models in {shown or 'any of the default folders'}"
            remedy = "Give a folder: llamasup list FOLDER; or download a model: llamasup pull org/repo"
            view.say("info", "empty", error_text(text, remedy))
        for problem in _unlisted_problems(registry):
            if problem.quiet and not all_:
                continue
            view.say("warning", "problem", f"llamasup: {printable(problem.message)}")
        for note in search.notes:
            view.say("warning", "left_out", f"llamasup: {printable(note)}")
    codes = [show_error(view, error) for error in errors.values()]
    return codes[0] if codes else 0


def _file_error(path: Path) -> LlamasupError | None:
    if path_kind(path) is not PathKind.FILE:
        return None
    use = f"llamasup inspect {shlex.quote(str(path))}"
    return ModelMissing(f"{path} is a file; list takes folders.", remedy=f"Run: {use}")


def _is_other(file: FoundModel) -> bool:
    """Whether it is a file that can be read, and no model by itself."""
    return not isinstance(file.outcome, LlamasupError) and not is_served(file.outcome)


def _unlisted_problems(registry: Registry) -> list[Problem]:
    """The problems of files without a row in the table."""
    return [problem for problem in registry.problems if not set(problem.names) & registry.specs.keys()]


# --- as text ---------------------------------------------------------------------------------------


def _as_text(specs: Sequence[ModelSpec], others: Sequence[FoundModel], attachments: Attachments) -> str:
    rows = [("NAME", "CLASS", "SIZE", "QUANT", "CONTEXT", "WHERE")]
    for spec in specs:
        facts = spec.listed
        if facts is None:
            problem = spec.problem.removeprefix(f"{spec.source}: ")
            rows.append((spec.id, "broken", "", "", "", printable(f"{_shown_path(spec.source)}: {problem}")))
            continue
        where = _shown_path(spec.source)
        if (projector := spec.projector) is not None:
            where += f", with {PurePath(projector).name}"
        if adapters := attachments.adapters.get(spec.source):
            where += f", adapters: {', '.join(PurePath(adapter).name for adapter in adapters)}"
        context = f"{facts.context_length:,}" if facts.context_length else ""
        size = memory_text(facts.file_bytes)
        rows.append((spec.id, str(facts.model_class), size, facts.quantization, context, printable(where)))
    for file in others:
        facts = _facts(file)
        where = ": ".join(filter(None, (_shown_path(file.path), facts.contents)))
        row = (_name(file), str(facts.model_class), memory_text(facts.file_bytes), facts.quantization)
        rows.append((*row, "", printable(where)))
    return table(rows, indent="", columns=stdout_columns())


def _name(file: FoundModel) -> str:
    return file.ids[0] if file.ids else printable(PurePath(file.path).name)


def _facts(file: FoundModel) -> ModelFacts:
    assert not isinstance(file.outcome, LlamasupError)
    return file.outcome


def _shown_path(path: str) -> str:
    home = (os.environ.get("HOME") or os.environ.get("USERPROFILE", "")).rstrip(os.sep)
    is_at_home = bool(home) and path.startswith(f"{home}{os.sep}")
    return f"~{path.removeprefix(home)}" if is_at_home else path


# --- as JSON ---------------------------------------------------------------------------------------


def _as_json(
    specs: Sequence[ModelSpec],
    others: Sequence[FoundModel],
    registry: Registry,
    search: Search,
    folders: Sequence[Path],
) -> Mapping[str, Any]:
    attachments = Attachments.among(search.found)
    return {
        "models": [*(_model(spec, attachments) for spec in specs), *map(_other, others)],
        "problems": [
            {
                "message": printable(problem.message),
                "remedy": printable(problem.remedy),
                "cause": problem.cause,
                "names": list(problem.names),
                "paths": list(map(path_text, problem.paths)),
            }
            for problem in registry.problems
        ],
        "notes": [printable(note) for note in search.notes],
        "folders": [path_text(str(folder)) for folder in folders],
    }


def _model(spec: ModelSpec, attachments: Attachments) -> Mapping[str, Any]:
    facts, projector = spec.listed, spec.projector
    common = {
        "id": spec.id,
        "aliases": list(spec.aliases),
        "path": path_text(spec.source),
        "problem": printable(spec.problem) or None,
    }
    if facts is None:
        return {**common, "class": None}
    return {
        **common,
        **_described(facts),
        "output_modalities": output_modalities(facts, resolved(spec).works),
        "projector": None if projector is None else path_text(projector),
        "adapters": [path_text(path) for path in attachments.adapters.get(spec.source, ())],
    }


def _other(file: FoundModel) -> Mapping[str, Any]:
    common = {"id": _name(file), "path": path_text(file.path)}
    return {
        **common,
        "aliases": [],
        "problem": None,
        **_described(_facts(file)),
        "projector": None,
        "adapters": [],
    }


def _described(facts: ModelFacts) -> Mapping[str, Any]:
    return {
        "class": facts.model_class.value,
        "architecture": facts.architecture,
        "contents": facts.contents or None,
        "file_bytes": facts.file_bytes,
        "files": facts.split.count,
        "quantization": facts.quantization,
        "parameters": facts.parameters,
        "context_length": facts.context_length,
    }


# --- rm --------------------------------------------------------------------------------------------


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
