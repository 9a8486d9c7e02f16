"""``llamasup list``: the models on this machine, by the names that clients use."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer

from llamasup.cli.command_group import command_set
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import error_text, guarded, show_error
from llamasup.cli.output.layout import stdout_columns, table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View
from llamasup.errors import LlamasupError, ModelMissing
from llamasup.models.attachments import Attachments
from llamasup.models.registry import Problem, Registry, build
from llamasup.models.search import Search, cache_folders, search_models
from llamasup.models.spec import ModelSpec
from llamasup.system.storage.folders import models_folder
from llamasup.system.storage.paths import PathKind, expanded, path_kind
from llamasup.system.text import memory_text, path_text, printable

__all__ = ["commands"]

commands = command_set()

Folders = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FOLDER...",
        help="Folders with models. Default: llamasup's own and the caches of Hugging Face and llama.cpp.",
        show_default=False,
    ),
]


@commands.command("list")
def list_models(folders: Folders = None, json: o.Json = False) -> int:
    """List the models on this machine by name.

    If a folder cannot be read, the models of the other folders are still listed.
    """

    def act(view: View) -> int:
        paths = tuple(map(expanded, folders)) if folders else _default_folders()
        errors = {path: error for path in paths if (error := _file_error(path)) is not None}
        search = search_models([path for path in paths if path not in errors])
        errors |= {Path(path): error for path, error in search.missing.items()}
        registry = build((), search.found)
        if json:
            write_json(_as_json(registry, search, paths))
        else:
            if registry.specs:
                write_result(_as_text(registry, Attachments.among(search.found)))
            elif len(errors) < len(paths) or not paths:
                shown = ", ".join(printable(str(path)) for path in paths)
                text = f"llamasup: no models in {shown or 'any of the default folders'}"
                remedy = "Give a folder: llamasup list FOLDER; or download a model: llamasup pull org/repo"
                view.say("info", "empty", error_text(text, remedy))
            for problem in _unlisted_problems(registry):
                view.say("warning", "problem", f"llamasup: {printable(problem.message)}")
            for note in search.notes:
                view.say("warning", "left_out", f"llamasup: {printable(note)}")
        codes = [show_error(view, error) for error in errors.values()]
        return codes[0] if codes else 0

    return guarded(act)


def _default_folders() -> tuple[Path, ...]:
    caches = cache_folders(("huggingface", "llama.cpp"), os.environ)
    folders = dict.fromkeys((models_folder(), *caches))
    return tuple(folder for folder in folders if path_kind(folder) is not PathKind.NOTHING)


def _file_error(path: Path) -> LlamasupError | None:
    if path_kind(path) is not PathKind.FILE:
        return None
    use = f"llamasup inspect {shlex.quote(str(path))}"
    return ModelMissing(f"{path} is a file; list takes folders.", remedy=f"Run: {use}")


def _unlisted_problems(registry: Registry) -> list[Problem]:
    """The problems of files without a row in the table."""
    return [problem for problem in registry.problems if not set(problem.names) & registry.specs.keys()]


# --- as text ---------------------------------------------------------------------------------------


def _as_text(registry: Registry, attachments: Attachments) -> str:
    rows = [("NAME", "CLASS", "SIZE", "QUANT", "CONTEXT", "WHERE")]
    for spec in registry.specs.values():
        facts = spec.listed
        if facts is None:
            problem = spec.problem.removeprefix(f"{spec.source}: ")
            rows.append((spec.id, "broken", "", "", "", printable(f"{_shown_path(spec)}: {problem}")))
            continue
        where = _shown_path(spec)
        if (projector := spec.projector) is not None:
            where += f", with {PurePath(projector).name}"
        if adapters := attachments.adapters.get(spec.source):
            where += f", adapters: {', '.join(PurePath(adapter).name for adapter in adapters)}"
        context = f"{facts.context_length:,}" if facts.context_length else ""
        size = memory_text(facts.file_bytes)
        rows.append((spec.id, str(facts.model_class), size, facts.quantization, context, printable(where)))
    return table(rows, indent="", columns=stdout_columns())


def _shown_path(spec: ModelSpec) -> str:
    home = (os.environ.get("HOME") or os.environ.get("USERPROFILE", "")).rstrip(os.sep)
    is_at_home = bool(home) and spec.source.startswith(f"{home}{os.sep}")
    return f"~{spec.source.removeprefix(home)}" if is_at_home else spec.source


# --- as JSON ---------------------------------------------------------------------------------------


def _as_json(registry: Registry, search: Search, folders: Sequence[Path]) -> Mapping[str, Any]:
    attachments = Attachments.among(search.found)
    return {
        "models": [_model(spec, attachments) for spec in registry.specs.values()],
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
        "class": facts.model_class.value,
        "architecture": facts.architecture,
        "file_bytes": facts.file_bytes,
        "files": facts.split.count,
        "quantization": facts.quantization,
        "parameters": facts.parameters,
        "context_length": facts.context_length,
        "projector": None if projector is None else path_text(projector),
        "adapters": [path_text(path) for path in attachments.adapters.get(spec.source, ())],
    }
