"""``llamasup inspect``: what a model is, what it takes and whether it fits here. Starts and asks nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from llamasup.cli.errors import show_error
from llamasup.cli.outlet import Outlet
from llamasup.cli.results import write_result
from llamasup.cli.view import TextView, plural, table
from llamasup.core.errors import LlamasupError
from llamasup.core.hardware import Hardware
from llamasup.core.inspection import (
    PURPOSES,
    Fit,
    broken_as_json,
    fits_here,
    is_served,
    kv_growth,
    model_as_json,
    projectors_of,
)
from llamasup.core.model_facts import ModelFacts
from llamasup.core.printable import printable
from llamasup.core.projectors import Pairing
from llamasup.core.units import memory_text
from llamasup.effects.hardware import hardware
from llamasup.effects.model_file import read_model
from llamasup.effects.model_folder import ModelFolder, list_models
from llamasup.runtime.launch import find_model, projector_beside

__all__ = ["inspect_command"]


def inspect_command(model: str, *, json: bool) -> int:
    """Print what is known of a model, or of every model in a folder. Returns the exit code."""
    stderr = Outlet(sys.stderr)
    view = TextView(stderr)
    try:
        path, machine = find_model(model), hardware()
        if path.is_dir():
            folder = list_models(path)
            write_result(_folder_json(folder, machine) if json else _folder_text(path, folder, machine))
            for note in folder.notes:
                view.say("warning", "left_out", f"llamasup: {note}")
        else:
            facts = read_model(path)
            fit, found = fits_here(facts, machine, sys.byteorder), projector_beside(path, facts)
            write_result(
                _json(model_as_json(str(path), facts, fit, _projector_path(found)))
                if json
                else _model_text(path, facts, fit, found)
            )
    except Exception as error:
        return show_error(view, error)
    finally:
        stderr.close()
    return 0


# --- a folder ------------------------------------------------------------------------------------


def _pairs(folder: ModelFolder) -> dict[str, str]:
    sound = {
        found.path: found.outcome for found in folder.models if not isinstance(found.outcome, LlamasupError)
    }
    return projectors_of(sound, [found.path for found in folder.models if found.path not in sound])


def _folder_json(folder: ModelFolder, machine: Hardware) -> str:
    pairs = _pairs(folder)
    models = [
        broken_as_json(found.path, found.outcome)
        if isinstance(found.outcome, LlamasupError)
        else model_as_json(
            found.path,
            found.outcome,
            fits_here(found.outcome, machine, sys.byteorder),
            pairs.get(found.path),
        )
        for found in folder.models
    ]
    return _json({"models": models, "notes": [printable(note) for note in folder.notes]})


def _json(value: dict[str, Any]) -> str:
    # The json module takes three times as long for a folder of 1,000 models.
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _folder_text(top: Path, folder: ModelFolder, machine: Hardware) -> str:
    pairs = _pairs(folder)
    rows = [("NAME", "CLASS", "ARCHITECTURE", "SIZE", "QUANT", "CONTEXT", "FITS HERE")]
    for found in folder.models:
        name = printable(os.path.relpath(found.path, top))
        if isinstance(found.outcome, LlamasupError):
            why = found.outcome.message.removeprefix(f"{found.path}: ")
            rows.append((name, "broken", "", "", "", "", printable(why)))
            continue
        fit = fits_here(found.outcome, machine, sys.byteorder)
        projector = pairs.get(found.path)
        last = _fit_text(found.outcome, fit) + (f", with {_file_name(projector)}" if projector else "")
        rows.append((name, *_columns(found.outcome), last))
    return table(rows, indent="")


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
    if fit.foreign:
        return _verdict(fit)
    need, free = memory_text(fit.needed_bytes), memory_text(fit.available_bytes)
    return f"{_verdict(fit)}: {need} of {free}"


# --- one model -----------------------------------------------------------------------------------


def _model_text(path: Path, facts: ModelFacts, fit: Fit | None, found: Pairing | None) -> str:
    sections = (
        ("Model", list(_identity(path, facts, found))),
        ("Inside", list(_inside(facts))),
        ("Memory", list(_memory(facts, fit))),
    )
    width = max(len(label) for _, rows in sections for label, _ in rows)
    return "\n\n".join(
        f"{title}\n{table([(label.ljust(width), text) for label, text in rows])}"
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
    more = f", {memory_text(surplus)} more than its header accounts for" if surplus > 4096 else ""
    yield "size", memory_text(facts.file_bytes) + more
    if projector := _projector_path(found):
        yield "projector", f"{_file_name(projector)}, beside it"
    elif found is not None:
        yield "projector", printable(found.reason)
    if facts.big_endian:
        yield "byte order", "big-endian: for big-endian machines only"


def _inside(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    if facts.context_length:
        yield "context", f"{facts.context_length:,} tokens"
    if facts.layers:
        mtp = f", {facts.mtp_layers} of them to guess ahead (MTP)" if facts.mtp_layers else ""
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
        words = ", ".join(filter(None, (facts.vocabulary.model, facts.vocabulary.pre)))
        yield "vocabulary", f"{facts.vocab_size:,} tokens" + (f" ({printable(words)})" if words else "")
    template = facts.chat_template
    if template.present:
        can = [
            name
            for name, able in (
                ("system messages", template.system),
                ("tools", template.tools),
                ("reasoning", template.reasoning),
            )
            if able
        ]
        yield "chat template", "with " + ", ".join(can) if can else "plain"
    if facts.fim.usable:
        yield "infill", "fills in the middle of code (/infill)"


def _memory(facts: ModelFacts, fit: Fit | None) -> Iterator[tuple[str, str]]:
    if facts.weights_bytes:
        yield "weights", _weights_text(facts)
    if not is_served(facts):
        return
    types = ("f16", "q8_0") if facts.quantized_kv_fits else ("f16",)
    growths = [(each, kv_growth(facts, each)) for each in types]
    if any(growth.bytes_per_1000_tokens for _, growth in growths):
        sizes = (f"{memory_text(growth.bytes_per_1000_tokens)} in {each}" for each, growth in growths)
        yield "KV cache", "for each 1,000 tokens " + ", ".join(sizes)
    fixed = growths[0][1].slot_bytes
    if fixed:
        yield "besides", f"{memory_text(fixed)} for each request, however long it is"
    if fit is not None and fit.foreign:
        yield "fits here", _verdict(fit)
    elif fit is not None:
        kept = f" with a KV cache in {fit.kv_type}" if growths[0][1].bytes_per_1000_tokens else ""
        load = f"{plural(fit.parallel, 'request')} of {fit.ctx_size:,} tokens{kept}"
        free = f"{memory_text(fit.available_bytes)} are free, GPUs not counted"
        yield "fits here", f"{_verdict(fit)}: {memory_text(fit.needed_bytes)} for {load}; {free}"


def _verdict(fit: Fit) -> str:
    if fit.foreign:
        return "no: its byte order is not this machine's, and llama-server does not turn it"
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
