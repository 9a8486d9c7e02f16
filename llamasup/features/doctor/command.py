"""Checks this machine (``llamasup doctor``), and shows facts about models (``llamasup inspect``).

Starts no server. Creates llamasup's own folders if they are missing, to see whether that is possible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Struct

from llamasup.cli.command_group import argument, command_set, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import whole_number
from llamasup.cli.output.error_report import guarded, show_error
from llamasup.cli.output.layout import hanging, stdout_columns, table
from llamasup.cli.output.results import write_result
from llamasup.cli.output.view import View, plural, while_waiting
from llamasup.core.gguf.facts import PURPOSES, ModelFacts, is_served
from llamasup.core.gguf.files import read_model
from llamasup.core.models.folder import ModelFolder, list_models
from llamasup.core.system.hardware.facts import Hardware
from llamasup.core.system.hardware.probe import hardware
from llamasup.core.system.storage.paths import PathKind, path_kind
from llamasup.core.system.text import json_text, memory_text, printable
from llamasup.errors import LlamasupError, ModelMissing, OutputFailed, UsageInvalid
from llamasup.features.doctor.checks import as_json, run_checks
from llamasup.features.doctor.facts import Check, Facts
from llamasup.features.doctor.inspection import (
    Fit,
    broken_as_json,
    fits_here,
    kv_growths,
    model_as_json,
    projectors_of,
)

if TYPE_CHECKING:
    from llamasup.core.planning.projectors import Pairing

commands = command_set()

STDOUT = Path("-")

Model = Annotated[str | None, argument("MODEL", "Also check whether this model can be served.")]
Port = Annotated[int, option("--port", "N", "Check whether this port is free.", read=whole_number)]
Report = Annotated[
    Path | None,
    option(
        "--report",
        "FILE",
        "Also write a file for a bug report, without prompts and keys ('-': to standard output).",
    ),
]
Certificate = Annotated[
    Path | None, option("--tls-cert", "PATH", "Also check the dates of the certificate in this PEM file.")
]


@commands.command()
@guarded
def doctor(
    view: View,
    model: Model = None,
    runtime: o.RuntimeOption = None,
    port: Port = 8080,
    tls_cert: Certificate = None,
    report: Report = None,
    json: o.Json = False,
) -> int:
    """Check this machine for problems, and show a remedy for each.

    The checks look at runtimes, devices, memory, limits, folders and the port. The exit code is 1 if a
    check fails.
    """
    from llamasup.features.doctor.collect import collect_facts

    if report == STDOUT and json:
        raise UsageInvalid(
            "--json and --report - both write to standard output.",
            remedy="Leave one of them out, or give --report a file.",
        )
    problem = _port_problem(port)
    with while_waiting(view, "checking the runtimes and their devices"):  # a driver may take 20 s
        facts = collect_facts(
            model,
            runtime=runtime,
            port=port,
            port_problem=problem,
            environ=os.environ,
            tls_cert=tls_cert,
        )
    checks = run_checks(facts)
    if report is not None:
        _write_report(view, report, facts, checks)
    if report != STDOUT:
        write_result(json_text(as_json(checks), indent=2) if json else _as_text(checks, stdout_columns()))
    return 0 if all(check.ok for check in checks) else 1


def _write_report(view: View, target: Path, facts: Facts, checks: Sequence[Check]) -> None:
    from llamasup.core.system.storage.folders import atomic_write
    from llamasup.features.doctor.bug_report import bug_report
    from llamasup.features.doctor.collect import collect_running, versions

    text = bug_report(
        versions=versions(),
        checks=checks,
        plan=None if facts.model is None else facts.model.plan,
        running=collect_running(),
        environ=os.environ,
        home=str(Path.home()),
    )
    if target == STDOUT:
        write_result(text.rstrip("\n"))
        return
    try:
        atomic_write(target, text.encode())
    except OSError as error:
        raise OutputFailed(
            f"Cannot write the report to {str(target)!r}: {error.strerror}.", remedy="Give another file."
        ) from None
    view.say("info", "doctor", f"The report is in {target}. Read it before you publish it")


def _port_problem(port: int) -> LlamasupError | None:
    """Return the error that ``run`` would have with this port."""
    from llamasup.core.proxy.listeners.bind import bind

    if not 0 <= port <= 65535:
        raise UsageInvalid(f"Invalid --port {port}.", remedy="Give 1 to 65535, or 0 for any free port.")
    try:
        for sock in bind("127.0.0.1", port):
            sock.close()
    except LlamasupError as error:
        return error
    return None


def _as_text(checks: Sequence[Check], columns: int | None) -> str:
    width = max(len(check.name) for check in checks)
    lines: list[str] = []
    for check in checks:
        start = f"{'ok' if check.ok else '!!'}  {check.name:<{width}}  "
        lines.append(hanging(start, printable(check.found), columns=columns))
        if check.remedy:
            lines.append(hanging(f"    {'':<{width}}  → ", printable(check.remedy), columns=columns))
    failed = sum(not check.ok for check in checks)
    lines.append(f"{failed} of {len(checks)} checks found a problem." if failed else "No problems found.")
    return "\n".join(lines)


# --- inspect --------------------------------------------------------------------------------

Models = Annotated[list[str], argument("MODEL|FOLDER...", "GGUF files, folders with GGUF files, or 'demo'.")]


class _Inspected(Struct, frozen=True):
    """One argument, with the facts of its model, the models of its folder, or an error."""

    path: Path
    found: ModelFacts | ModelFolder | LlamasupError


@commands.command()
@guarded
def inspect(view: View, models: Models, json: o.Json = False) -> int:
    """Show facts about a model, and whether it fits in memory.

    For a folder, show every model in it. If a model is broken, the others are still shown. The exit code is
    that of the first error.
    """
    machine = hardware()
    inspected = [_inspect(name, allow_empty=json) for name in models]
    errors = [item.found for item in inspected if isinstance(item.found, LlamasupError)]
    if len(errors) < len(inspected) or (json and len(inspected) > 1):
        text = (
            _models_json(inspected, machine) if json else _models_text(inspected, machine, stdout_columns())
        )
        write_result(text)
    if not json:
        for item in inspected:
            for note in item.found.notes if isinstance(item.found, ModelFolder) else ():
                view.say("warning", "left_out", f"llamasup: {note}")
    codes = [show_error(view, error) for error in errors]
    return codes[0] if codes else 0


def _inspect(name: str, *, allow_empty: bool) -> _Inspected:
    """Text output refuses an empty folder, which is most likely the wrong one; JSON shows an empty list."""
    from llamasup.core.models.by_name import file_of
    from llamasup.core.planning.facts import find_model

    path = Path(name)
    try:
        path = find_model(file_of(name))
        found = list_models(path) if path_kind(path) is PathKind.FOLDER else read_model(path)
        if isinstance(found, ModelFolder) and not found.models and not allow_empty:
            raise _no_models(path, found)
    except LlamasupError as error:
        return _Inspected(path, error)
    return _Inspected(path, found)


def _no_models(path: Path, folder: ModelFolder) -> ModelMissing:
    left_out = f" ({'; '.join(folder.notes)})" if folder.notes else ""
    return ModelMissing(
        f"{path}: no .gguf file in this folder or its subfolders{left_out}",
        remedy="Give the path of a .gguf file, or the folder that holds your models.",
    )


def _models_json(inspected: Sequence[_Inspected], machine: Hardware) -> str:
    """Format one file as an object, otherwise as a list."""
    if len(inspected) == 1 and isinstance(inspected[0].found, ModelFacts):
        return json_text(*_objects(inspected[0], machine), indent=2)
    objects = [model for item in inspected for model in _objects(item, machine)]
    folders = [item.found for item in inspected if isinstance(item.found, ModelFolder)]
    notes = [printable(note) for folder in folders for note in folder.notes]
    return json_text({"models": objects, "notes": notes}, indent=2)


def _objects(item: _Inspected, machine: Hardware) -> Iterator[dict[str, Any]]:
    from llamasup.core.planning.facts import sibling_projector

    path, found = str(item.path), item.found
    if isinstance(found, LlamasupError):
        yield broken_as_json(path, found)
    elif isinstance(found, ModelFolder):
        yield from _folder_objects(found, machine)
    else:
        fit, projector = fits_here(found, machine, sys.byteorder), sibling_projector(item.path, found)
        yield model_as_json(path, found, fit, _projector_path(projector))


def _models_text(inspected: Sequence[_Inspected], machine: Hardware, columns: int | None) -> str:
    from llamasup.core.planning.facts import sibling_projector

    sections = []
    for path, found in ((item.path, item.found) for item in inspected):
        if isinstance(found, ModelFolder):
            title = "" if len(inspected) == 1 else f"{printable(str(path))}\n"
            sections.append(title + _folder_text(path, found, machine, columns))
        elif isinstance(found, ModelFacts):
            fit = fits_here(found, machine, sys.byteorder)
            sections.append(_model_text(path, found, fit, sibling_projector(path, found), columns))
    return "\n\n".join(sections)


# --- a folder ------------------------------------------------------------------------------------


def _pairs(folder: ModelFolder) -> dict[str, str]:
    valid = {
        model.path: model.outcome for model in folder.models if not isinstance(model.outcome, LlamasupError)
    }
    return projectors_of(valid, [model.path for model in folder.models if model.path not in valid])


def _folder_objects(folder: ModelFolder, machine: Hardware) -> Iterator[dict[str, Any]]:
    pairs = _pairs(folder)
    for model in folder.models:
        if isinstance(model.outcome, LlamasupError):
            yield broken_as_json(model.path, model.outcome)
        else:
            fit = fits_here(model.outcome, machine, sys.byteorder)
            yield model_as_json(model.path, model.outcome, fit, pairs.get(model.path))


def _folder_text(top: Path, folder: ModelFolder, machine: Hardware, columns: int | None) -> str:
    pairs = _pairs(folder)
    rows = [("NAME", "CLASS", "ARCHITECTURE", "SIZE", "QUANT", "CONTEXT", "FITS HERE")]
    for model in folder.models:
        name = printable(os.path.relpath(model.path, top))
        if isinstance(model.outcome, LlamasupError):
            problem = model.outcome.message.removeprefix(f"{model.path}: ")
            rows.append((name, "broken", "", "", "", "", printable(problem)))
            continue
        fit = fits_here(model.outcome, machine, sys.byteorder)
        projector = pairs.get(model.path)
        last = _fit_text(model.outcome, fit) + (f", with {_file_name(projector)}" if projector else "")
        rows.append((name, *_columns(model.outcome), last))
    return table(rows, indent="", columns=columns)


def _file_name(path: str) -> str:
    return printable(Path(path).name)


def _columns(facts: ModelFacts) -> tuple[str, str, str, str, str]:
    files = f" in {facts.split.count} files" if facts.split.count > 1 else ""
    return (
        facts.model_class,
        printable(facts.architecture),
        memory_text(facts.file_bytes) + files,
        facts.quantization,
        f"{facts.context_length:,}" if facts.context_length else "",
    )


def _fit_text(facts: ModelFacts, fit: Fit | None) -> str:
    if fit is None:
        return f"({PURPOSES[facts.model_class]})"
    if fit.foreign_byte_order:
        return _verdict(fit)
    need, free = memory_text(fit.needed_bytes), memory_text(fit.available_bytes)
    return f"{_verdict(fit)}: {need} of {free}"


# --- one model -----------------------------------------------------------------------------------


def _model_text(
    path: Path, facts: ModelFacts, fit: Fit | None, found: Pairing | None, columns: int | None
) -> str:
    sections = (
        ("Model", list(_identity(path, facts, found))),
        ("Inside", list(_inside(facts))),
        ("Memory", list(_memory(facts, fit))),
    )
    width = max(len(label) for _, rows in sections for label, _ in rows)
    return "\n\n".join(
        f"{title}\n{table([(label.ljust(width), text) for label, text in rows], columns=columns)}"
        for title, rows in sections
        if rows
    )


def _projector_path(found: Pairing | None) -> str | None:
    return None if found is None or found.projector is None else found.projector.path


def _identity(path: Path, facts: ModelFacts, found: Pairing | None) -> Iterator[tuple[str, str]]:
    split = facts.split.count
    yield "file", printable(str(path)) + (f" and {plural(split - 1, 'more part')}" if split > 1 else "")
    if facts.name:
        yield "name", printable(facts.name)
    yield "class", f"{facts.model_class}: {PURPOSES[facts.model_class]}"
    yield "architecture", printable(facts.architecture)
    if facts.parameters:
        yield "parameters", f"{_count_text(facts.parameters)}, {facts.quantization}"
    surplus = facts.file_bytes - facts.expected_bytes
    more = f", {memory_text(surplus)} more than its header describes" if surplus > 4096 else ""
    yield "size", memory_text(facts.file_bytes) + more
    if projector := _projector_path(found):
        yield "projector", f"{_file_name(projector)}, in the same folder"
    elif found is not None:
        yield "projector", printable(found.reason)
    if facts.big_endian:
        yield "byte order", "big-endian: for big-endian machines only"


def _inside(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    if facts.context_length:
        yield "context", f"{facts.context_length:,} tokens"
    if facts.layers:
        mtp = f", {facts.mtp_layers} of them for speculative decoding (MTP)" if facts.mtp_layers else ""
        yield "layers", f"{facts.layers}, width {facts.embedding_length:,}{mtp}"
    heads, heads_kv = max(facts.head_counts, default=0), max(facts.head_counts_kv, default=0)
    if heads:
        shared = f", {heads_kv} for keys and values" if heads_kv not in (0, heads) else ""
        latent = ", latent (MLA)" if facts.mla else ""
        yield "attention", f"{plural(heads, 'head')} of {facts.key_length}{shared}{latent}"
    if any(facts.sliding_layers):
        yield "window", f"{facts.sliding_window:,} tokens in {plural(sum(facts.sliding_layers), 'layer')}"
    if any(facts.recurrent_layers):
        yield "recurrent", f"{plural(sum(facts.recurrent_layers), 'layer')} of {facts.layers}"
    if facts.experts.count:
        shared = f" and {facts.experts.shared} shared" if facts.experts.shared else ""
        yield "experts", f"{facts.experts.used} of {facts.experts.count}{shared} for each token"
    if facts.pooling:
        yield "pooling", facts.pooling
    if facts.vocab_size:
        tokenizer = ", ".join(filter(None, (facts.vocabulary.model, facts.vocabulary.pre)))
        kind = f" ({printable(tokenizer)})" if tokenizer else ""
        yield "vocabulary", f"{facts.vocab_size:,} tokens{kind}"
    template = facts.chat_template
    if template.present:
        features = {
            "system messages": template.system,
            "tools": template.tools,
            "reasoning": template.reasoning,
        }
        supported = ", ".join(name for name, is_supported in features.items() if is_supported)
        yield "chat template", f"with {supported}" if supported else "plain"
    if facts.fim.usable:
        yield "infill", "fills in the middle of code (/infill)"


def _memory(facts: ModelFacts, fit: Fit | None) -> Iterator[tuple[str, str]]:
    if facts.weights_bytes:
        yield "weights", _weights_text(facts)
    if not is_served(facts):
        return
    growths = kv_growths(facts)
    grows = any(growth.bytes_per_1000_tokens for growth in growths.values())
    if grows:
        sizes = (
            f"{memory_text(growth.bytes_per_1000_tokens)} in {kv_type}" for kv_type, growth in growths.items()
        )
        yield "KV cache", "for each 1,000 tokens " + ", ".join(sizes)
    fixed = growths["f16"].slot_bytes
    if fixed:
        yield "state", f"{memory_text(fixed)} for each request, of any length"
    if fit is not None and fit.foreign_byte_order:
        yield "fits here", _verdict(fit)
    elif fit is not None:
        cache = f" with a KV cache in {fit.kv_type}" if grows else ""
        load = f"{plural(fit.parallel, 'request')} of {fit.ctx_size:,} tokens{cache}"
        free = f"{memory_text(fit.available_bytes)} are free, without GPU memory"
        yield "fits here", f"{_verdict(fit)}: {memory_text(fit.needed_bytes)} for {load}; {free}"


def _verdict(fit: Fit) -> str:
    if fit.foreign_byte_order:
        return "no: its byte order differs from the machine's, and llama-server does not convert it"
    return "no" if not fit.fits else "yes, with less" if fit.reduced else "yes"


def _weights_text(facts: ModelFacts) -> str:
    layers = sum(facts.layer_bytes)
    if not layers:
        return memory_text(facts.weights_bytes)
    experts = sum(facts.expert_bytes)
    parts = [f"{memory_text(layers)} in layers (the largest {memory_text(max(facts.layer_bytes))})"]
    if experts:
        parts.append(f"of which {memory_text(experts)} experts")
    parts += [
        f"{memory_text(size)} {name}"
        for name, size in (("input", facts.input_bytes), ("output", facts.output_bytes))
        if size
    ]
    return f"{memory_text(facts.weights_bytes)}: {', '.join(parts)}"


def _count_text(count: int) -> str:
    for unit, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,}"
