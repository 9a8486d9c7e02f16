"""Suggests a command or option in place of an unknown word, often one of another program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

# Of Ollama, Docker, LM Studio, llama-swap and others. First: the group of subcommands.
_COMMANDS_OF_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        f"{group} {word}".lstrip(): command
        for group, command, words in (
            ("", "--help", "help"),
            ("", "--version", "version"),
            ("", "doctor", "check diagnose"),
            ("", "inspect", "info show"),
            ("", "list", "ls models"),
            ("", "logs", "log"),
            ("", "ps", "running"),
            ("", "pull", "add download get"),
            ("", "rm", "delete remove"),
            ("", "run", "start"),
            ("", "serve", "daemon server up"),
            ("", "service install", "install"),
            ("", "stop", "down exit kill quit"),
            ("", "tune", "bench benchmark"),
            ("batch", "batch cancel", "stop"),
            ("config", "config check", "test validate"),
            ("config", "config init", "create new"),
            ("fleet", "fleet deploy", "up"),
            ("key", "key list", "ls show"),
            ("key", "key new", "add create generate"),
            ("key", "key revoke", "delete remove rm"),
            ("service", "service install", "add create"),
            ("service", "service uninstall", "delete remove rm"),
        )
        for word in words.split()
    }
)
_CUTOFF = 0.7
_OF_PULL = ("--allow-http", "--allow-private")
_has_value = re.compile(r"(-[a-z]+)([0-9].*)").fullmatch  # -c4096
_TAKE_ONE_MODEL = ("run", "plan", "tune", "inspect")


def command_hint(word: str, commands: Iterable[str], group: str = "") -> str:
    """Suggest a command in place of an unknown one; empty if none is similar. ``group``: of subcommands."""
    suggested = _COMMANDS_OF_OTHERS.get(f"{group} {word.lower()}".lstrip(), "")
    if not suggested and not group and _is_model(word):
        suggested = f"run {shlex.quote(word)}"
    if not suggested:
        suggested = " ".join([group, *get_close_matches(word, list(commands), n=1)]).lstrip()
    return f"Did you mean llamasup {suggested}?" if suggested not in ("", group) else ""


def option_hint(
    option: str, words: Sequence[str], command: str, options: Sequence[str], *, passes_on: bool = False
) -> str:
    """Suggest an option in place of an unknown one; empty if none is similar.

    ``words`` are the words of the command line, ``command`` is empty before a command, and ``options`` are
    the options of the command. ``passes_on``: it passes words after the dashes to llama-server.
    """
    from llamasup.core.llama_server.argv_builder import OWN_OPTIONS  # only after a mistake

    word, value = typed(option, words)
    if (dashed := word.replace("_", "-")) in options:
        return f"Did you mean {dashed}?"
    own = OWN_OPTIONS.get(dashed, "")
    if own == "MODEL" and command in ("", "serve", *_TAKE_ONE_MODEL):
        shown = "MODEL" if not value or value.startswith("-") else shlex.quote(value)
        serving = command if command in _TAKE_ONE_MODEL else "run"
        return f"The model has no option: llamasup {serving} {shown}."
    if own in options:
        return f"Did you mean {own}?"
    if command == "serve" and (key := _key_of(dashed)):
        return f"In the config of serve, it is {key}."
    if command == "run" and dashed in _OF_PULL:
        return f"Download the model first: llamasup pull {dashed} URL."
    if not command:
        return "Options follow the command: llamasup run MODEL --port 8080."
    if passes_on and own.startswith("-- "):
        return f"For this option of llama-server: llamasup {command} MODEL {own} …"
    if near := get_close_matches(dashed, options, n=1, cutoff=_CUTOFF):
        return f"Did you mean {near[0]}?"
    return f"For an option of llama-server: llamasup {command} MODEL -- {dashed} …" if passes_on else ""


def _key_of(option: str) -> str:
    """Return the key of a config for an option of ``run``; empty if there is none."""
    from llamasup.core.config.config_keys import Http
    from llamasup.core.settings.declaration import settings_of

    name = option.removeprefix("--").replace("-", "_").removesuffix("y")  # trusted_proxies
    near = (key for key in settings_of(Http) if key.startswith(name) and len(key) <= len(name) + len("ies"))
    return next((f"http.{key}" for key in near), "") if name else ""


def typed(option: str, words: Sequence[str]) -> tuple[str, str]:
    """Return the option as typed, and its value: the parser reads -ngl as -n -g -l, and reports the first."""
    for each, following in zip(words, (*words[1:], ""), strict=True):
        word, _, value = each.partition("=")
        if word == option or (len(option) == 2 and word.startswith(option)):
            attached = _has_value(word)
            return (attached[1], attached[2]) if attached else (word, value or following)
    return option, ""


def surplus_hint(word: str, command: str) -> str:
    """Suggest a command in place of one that takes no such argument."""
    quoted = shlex.quote(word)
    if command == "stop":
        return f"This command stops llamasup itself. To unload one model: llamasup unload {quoted}."
    if command == "serve":
        if _is_file(word):
            return f"To serve one model: llamasup run {quoted}."
        return f"For the models of a folder: llamasup serve --models-dir {quoted}."
    return ""


def _is_file(word: str) -> bool:
    return word.lower().endswith(".gguf") or word == "demo"


def _is_model(word: str) -> bool:
    return _is_file(word) or "/" in word or ":" in word
