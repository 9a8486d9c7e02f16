"""The config that ``llamasup config init`` writes: what this machine has, and a word on everything (pure)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llamasup.system.text import memory_text

__all__ = ["GenerationContext", "starter_text"]


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """What was found. ``models_dirs`` and ``key_file`` are paths as they are to be written; ``devices`` the
    names and descriptions of the runtime's.
    """

    ram_bytes: int
    cores: int
    devices: Sequence[tuple[str, str]] = ()
    runtime: str | None = None
    models_dirs: Sequence[str] = ()
    caches: Sequence[str] = ()
    key_file: str | None = None


def starter_text(found: GenerationContext) -> str:
    """A config that ``check`` accepts as it is."""
    return "\n".join(
        (
            "# Configuration of llamasup: docs/configuration.md says what there is.",
            "# After a change: llamasup config check, then llamasup reload.",
            *_listening(found),
            *_models(found),
            *_memory(found),
            *_defaults(found),
            "",
        )
    )


def _listening(found: GenerationContext) -> tuple[str, ...]:
    key_file = found.key_file or "~/.config/llamasup/keys"
    used = "" if found.key_file else "#"
    make = "" if found.key_file else "  # make it first: llamasup key new NAME"
    return (
        "",
        "# Where clients come in. Another address than loopback needs a file of keys below.",
        "listen: 127.0.0.1:8080",
        f"{used}auth: {{api_key_file: {_text(key_file)}}}{make}",
        "",
        f"# The llama-server to use; auto found {found.runtime}."
        if found.runtime
        else "# No llama-server was found.",
        "runtime: auto",
    )


def _models(found: GenerationContext) -> tuple[str, ...]:
    lines = ["", "# Every model below these folders is served, under the name of its file."]
    if found.models_dirs:
        lines += ["models_dir:", *(f"  - {_text(folder)}" for folder in found.models_dirs)]
    else:
        lines += ["#models_dir: ~/models"]
    known = "huggingface, llama.cpp"
    if found.caches:
        lines += ["# Models that other programs have downloaded.", f"caches: [{', '.join(found.caches)}]"]
    else:
        lines += [f"#caches: [{known}]  # models that other programs have downloaded"]
    lines += ["", "# Models with settings of their own; a name with * or ? is a rule for all that match it."]
    if found.models_dirs or found.caches:
        lines += ["models:", '  "*embed*": {ttl: never}']
    else:
        lines += ["models:", "  demo: {path: demo}  # small and without sense: to see whether all works"]
    return (
        *lines,
        "#  qwen:",
        "#    path: qwen2.5-7b-instruct-q4_k_m.gguf",
        "#    aliases: [gpt-4o-mini]",
        "#    preload: true",
    )


def _memory(found: GenerationContext) -> tuple[str, ...]:
    devices = ", ".join(f"{name} ({description})" for name, description in found.devices)
    return (
        "",
        f"# How much of it all models together may take. There are {memory_text(found.ram_bytes)} of memory,",
        f"# and {devices or 'no GPU that this runtime can use'}.",
        f"memory: {{ram: 80%{', vram: 90%' if found.devices else ''}}}",
    )


def _defaults(found: GenerationContext) -> tuple[str, ...]:
    return (
        "",
        f"# What is said of no model in particular. Threads and all else are planned ({found.cores} cores).",
        "defaults:",
        "  ttl: 10m  # unload what was idle for so long; never: only when its memory is needed",
        "#  ctx_size: 8192  # tokens of one request",
    )


def _text(path: str) -> str:
    """A path as YAML, which takes JSON's strings; without quotes where nobody needs them."""
    plain = path.isascii() and all(letter.isalnum() or letter in "/._-" for letter in path.removeprefix("~"))
    return (
        path
        if plain and path[:1] in ("/", "~")
        else json.dumps(path.replace("${", "$${"), ensure_ascii=False)
    )
