"""Writes a config, checks a config, and prints the JSON Schema of a config (``llamasup config …``)."""

from __future__ import annotations

import json as json_format
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from msgspec import Struct

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View, plural
from llamasup.core.settings.names import is_pattern
from llamasup.core.system.storage.folders import atomic_write, device_and_inode, models_folder
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import memory_text, path_text, printable
from llamasup.errors import ConfigInvalid, LlamasupError, OutputFailed, UsageInvalid
from llamasup.features import attached

if TYPE_CHECKING:
    from llamasup.core.config.config_keys import Config

commands = command_set("config", "Write and check the configuration file of serve.")

_STANDARD_OUTPUT = Path("-")
# Common models folders, with LM Studio's.
_COMMON_FOLDERS = ("~/models", "~/Models", "~/.lmstudio/models", "/srv/models", "/models")

ConfigFile = Annotated[
    Path | None,
    argument(
        "FILE", "Default: $LLAMASUP_CONFIG, ~/.config/llamasup/config.yaml or /etc/llamasup/config.yaml."
    ),
]
Output = Annotated[
    Path | None,
    option(
        "--output",
        "PATH",
        "The file to write; - for standard output. Default: ~/.config/llamasup/config.yaml.",
    ),
]
Force = Annotated[bool, flag("--force", "Overwrite an existing file.")]


@commands.command()
@guarded
def init(view: View, output: Output = None, force: Force = False) -> None:
    """Write a commented config for this machine."""
    from llamasup.core.config.reading import own_config

    text = starter_text(_starter_facts(os.environ))
    if output == _STANDARD_OUTPUT:
        write_result(text.rstrip("\n"))
        return
    path = write_config(output or own_config(os.environ), text, force=force)
    view.say("info", "config", f"Wrote {printable(str(path))}")
    view.say("info", "config", f"  → Check it: llamasup config check {shlex.quote(str(path))}")


@commands.command()
@guarded
def check(view: View, file: ConfigFile = None, json: o.Json = False) -> int:
    """Show every mistake and every missing file in a config.

    The command starts nothing.
    """
    from llamasup.core.config.issues import ConfigIssues, Issue
    from llamasup.core.config.reading import find_config, read
    from llamasup.features import config_keys
    from llamasup.service.config_check import environment_issues, model_issues

    path = find_config(file, os.environ)
    try:
        reading, issues = read(path, os.environ, config_keys())
        unchecked, shared = "", tuple[tuple[str, ...], ...]()
        is_readable = not issues
        issues += environment_issues(reading, os.environ)
        if is_readable:  # otherwise models would be checked with the defaults of invalid values
            wrong, unchecked, shared = model_issues(reading, os.environ, issues)
            issues += wrong
        if issues:
            raise ConfigIssues(str(path), issues)
    except ConfigInvalid as error:
        if not json:
            raise
        from llamasup.service.config_editing import as_mistakes

        found = error.issues if isinstance(error, ConfigIssues) else (Issue(0, "", error.message),)
        write_json({"ok": False, "file": path_text(str(path)), "mistakes": as_mistakes(found)})
        return error.exit_code
    if json:
        done = {"ok": True, "file": path_text(str(path)), "mistakes": []}
        write_json({**done, "one_process": list(map(list, shared))})
    else:
        view.say("info", "config", f"{printable(str(path))} is valid: {_summary(reading.config)}.")
        for names in shared:
            text = f"One process serves {' and '.join(names)}, with the settings of all."
            view.say("info", "config", text)
        if unchecked:
            view.say("info", "config", f"The models were not checked: {unchecked}")
    return 0


@commands.command()
@guarded
def schema(_: View) -> None:
    """Print the JSON Schema of a config, for editors."""
    from llamasup.core.config.config_keys import json_schema
    from llamasup.features import config_keys

    write_json(json_schema(config_keys()))


def _summary(config: Config) -> str:
    named = sum(not is_pattern(name) for name in config.models)
    parts = (
        (named, "model"),
        (len(config.models) - named, "rule"),
        (len(config.models_dir), "folder"),
        (len(config.caches), "cache"),
    )
    return ", ".join(plural(count, noun) for count, noun in parts if count) or "downloads on demand"


def write_config(path: Path, text: str, *, force: bool) -> Path:
    """Write a new file, and return its path. Raises UsageInvalid if it exists, and OutputFailed."""
    path = expanded(path, UsageInvalid, of="--output")
    try:
        if path.is_dir():
            raise UsageInvalid(f"--output {str(path)!r} is a folder.", remedy="Give the path of a file.")
        if path.exists() and not force:
            raise UsageInvalid(
                f"{str(path)!r} already exists.",
                remedy="Give another --output, or overwrite the file with --force.",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode(), mode=0o644)
    except OSError as error:
        raise OutputFailed(
            f"Cannot write the config to {str(path)!r}: {error.strerror or error}.",
            remedy="Give another --output, or - for standard output.",
        ) from None
    return path


# --- this machine ------------------------------------------------------------------------------------


def _starter_facts(environ: Mapping[str, str]) -> StarterFacts:
    from llamasup.core.auth.key_source import default_key_file
    from llamasup.core.config.config_keys import Cache
    from llamasup.core.llama_server.inspect import find_runtime
    from llamasup.core.models.search import cache_folders
    from llamasup.core.system.hardware.probe import hardware

    machine = hardware()
    runtime, devices = None, []
    try:
        found = find_runtime(None, environ)
    except LlamasupError:
        pass  # init also works on a machine without a runtime
    else:
        runtime = f"{found.path} ({found.version})"
        devices = [(device.name, device.description) for device in found.capabilities.devices]
    keys = default_key_file()
    return StarterFacts(
        ram_bytes=machine.memory_total_bytes,
        cores=machine.physical_cores,
        devices=devices,
        runtime=runtime,
        # llamasup's own folder first: downloads go to the first one.
        models_dirs=_existing(filter(_is_text, (str(models_folder()), *_COMMON_FOLDERS))),
        caches=tuple(name for name in get_args(Cache) if cache_folders((name,), environ)),
        key_file=str(keys) if keys.is_file() and _is_text(str(keys)) else None,
    )


def _is_text(path: str) -> bool:
    """Whether a config, which is UTF-8, can contain the path."""
    return path_text(path) == path


def _existing(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the existing folders as written; one spelling for each, if the file system ignores case."""
    found: dict[tuple[int, int], str] = {}
    for name in folders:
        with suppress(RuntimeError):  # the folder of an unknown user
            if (folder := device_and_inode(Path(name).expanduser(), follow=True)) is not None:
                found.setdefault(folder, name)
    return tuple(found.values())


# --- the text that ``config init`` writes -------------------------------------------------------------------


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
            "# Configuration of llamasup. `llamasup help configuration.md` describes all keys.",
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
        else json_format.dumps(path.replace("${", "$${"), ensure_ascii=False)
    )


for _more in attached("config_commands"):
    commands.registered_commands += _more.registered_commands
