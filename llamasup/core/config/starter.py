"""The text of the config that ``llamasup config init`` writes, for the models and devices of this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec import Struct

from llamasup.core.system.text import memory_text


class StarterFacts(Struct, frozen=True):
    """The findings on this machine. ``models_dirs`` and ``key_file`` are paths as the config writes them;
    ``devices`` are names and descriptions.
    """

    ram_bytes: int
    cores: int
    devices: Sequence[tuple[str, str]] = ()
    runtime: str | None = None
    models_dirs: Sequence[str] = ()
    caches: Sequence[str] = ()
    key_file: str | None = None


def starter_text(found: StarterFacts) -> str:
    """Write a config that ``llamasup config check`` accepts."""
    return "\n".join(
        (
            "# Configuration of llamasup. docs/configuration.md describes all keys.",
            "# After a change, run `llamasup config check`, then `llamasup reload`.",
            *_listening(found),
            *_models(found),
            *_memory(found),
            *_defaults(found),
            "",
        )
    )


def _listening(found: StarterFacts) -> tuple[str, ...]:
    key_file = found.key_file or "~/.config/llamasup/keys"
    used = "" if found.key_file else "#"
    create = "" if found.key_file else "  # create it first: llamasup key new NAME"
    return (
        "",
        "# The address for clients. An address that other machines can reach needs the key file below.",
        "listen: 127.0.0.1:8080",
        f"{used}auth: {{api_key_file: {_text(key_file)}}}{create}",
        "",
        f"# The llama-server to use; auto found {found.runtime}."
        if found.runtime
        else "# The llama-server to use; auto found none.",
        "runtime: auto",
    )


def _models(found: StarterFacts) -> tuple[str, ...]:
    lines = ["", "# All models in these folders are served, each under the name of its file."]
    if found.models_dirs:
        lines += ["models_dir:", *(f"  - {_text(folder)}" for folder in found.models_dirs)]
    else:
        lines += ["#models_dir: ~/models"]
    known = "huggingface, llama.cpp"
    if found.caches:
        lines += ["# Models that other programs downloaded.", f"caches: [{', '.join(found.caches)}]"]
    else:
        lines += [f"#caches: [{known}]  # models that other programs downloaded"]
    lines += ["", "# Models with their own settings. A name with * or ? is a rule for all matching models."]
    if found.models_dirs or found.caches:
        lines += ["models:", '  "*embed*": {ttl: never}']
    else:
        lines += ["models:", "  demo: {path: demo}  # a tiny model of little stories, for a first test"]
    return (
        *lines,
        "#  qwen:",
        "#    path: qwen2.5-7b-instruct-q4_k_m.gguf",
        "#    aliases: [gpt-4o-mini]",
        "#    preload: true",
    )


def _memory(found: StarterFacts) -> tuple[str, ...]:
    devices = ", ".join(f"{name} ({description})" for name, description in found.devices)
    return (
        "",
        "# The most memory that all models together may use. This machine has",
        f"# {memory_text(found.ram_bytes)} of memory and {devices or 'no GPU that the runtime can use'}.",
        f"memory: {{ram: 80%{', vram: 90%' if found.devices else ''}}}",
    )


def _defaults(found: StarterFacts) -> tuple[str, ...]:
    return (
        "",
        f"# Settings for all models. llamasup plans the others, such as threads for the {found.cores} cores.",
        "defaults:",
        "  ttl: 10m  # unload a model after this time without requests; never: only if memory is needed",
        "#  ctx_size: 8192  # tokens for one request",
    )


def _text(path: str) -> str:
    """Write a path as YAML; in quotes, as JSON, if needed."""
    plain = path.isascii() and all(letter.isalnum() or letter in "/._-" for letter in path.removeprefix("~"))
    return (
        path
        if plain and path[:1] in ("/", "~")
        else json.dumps(path.replace("${", "$${"), ensure_ascii=False)
    )
