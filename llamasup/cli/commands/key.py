"""Creates, lists and revokes the API keys of a file (``llamasup key …``)."""

from __future__ import annotations

import difflib
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from llamasup.cli.command_group import argument, command_set, flag, option
from llamasup.cli.options import shared as o
from llamasup.cli.options.parsers import one_of, whole_number
from llamasup.cli.output.error_report import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_result, write_shown
from llamasup.cli.output.view import View
from llamasup.core.auth.api_key import (
    ApiKey,
    KeyLimits,
    KeyLine,
    Priority,
    checked_models,
    checked_name,
    key_line,
    read_key_lines,
    stored_form,
    with_rights,
    without_line,
)
from llamasup.core.auth.key_source import PROCESS_SALT, change_key_file, default_key_file, key_file_text
from llamasup.core.system.storage.paths import expanded
from llamasup.core.system.text import one_of_these
from llamasup.errors import UsageInvalid

commands = command_set(
    "key", "Create, list and revoke API keys.\n\nA running llamasup notices a change within a second."
)

# Secret scanners recognize a published key by this prefix.
_PREFIX = "llamasup-"
_KEY_BYTES = 32  # too many keys to try, so a fast hash is safe
_SALT_BYTES = 16
_HEADER = "# API keys of llamasup, one per line. docs/api-keys.md describes the fields after a key.\n"


_at_least_one = partial(whole_number, minimum=1)
Name = Annotated[str, argument("NAME", "Name of the key.")]
File = Annotated[Path | None, option("--file", "PATH", "The key file. Default: ~/.config/llamasup/keys.")]
Rights = Annotated[
    str,
    option(
        "--rights",
        "inference|control|node,…",
        "What the key may use: the models (inference), the control API, or both. inference,node is for a "
        "llamasup that has this one in its peers.",
        read=one_of(
            *("inference", "control", "inference,control", "control,inference"),
            *("inference,node", "inference,control,node"),
        ),
    ),
]
RequestsPerMinute = Annotated[
    int | None, option("--rpm", "N", "Limit of requests per minute.", read=_at_least_one)
]
Concurrent = Annotated[
    int | None, option("--concurrent", "N", "Limit of concurrent requests.", read=_at_least_one)
]
TokensPerMinute = Annotated[
    int | None, option("--tpm", "N", "Limit of tokens per minute, without cached tokens.", read=_at_least_one)
]
PriorityOption = Annotated[
    str,
    option(
        "--priority",
        "normal|high",
        "The highest priority that requests with this key may have.",
        read=one_of("normal", "high"),
    ),
]
ModelNames = Annotated[
    str | None,
    option(
        "--models", "NAME,…", "The only models that the key may use. Names may contain the wildcards * and ?."
    ),
]
Hashed = Annotated[
    bool, flag("--hashed", "Store only a hash of the key: the key is printed now and never again.")
]


@commands.command()
@guarded
def new(
    view: View,
    name: Name,
    rights: Rights = "inference",
    rpm: RequestsPerMinute = None,
    concurrent: Concurrent = None,
    tpm: TokensPerMinute = None,
    priority: PriorityOption = "normal",
    models: ModelNames = None,
    hashed: Hashed = False,
    file: File = None,
    json: o.Json = False,
) -> None:
    """Create a key, add it to the file, and print it."""
    path = _path(file)
    named = ApiKey(
        checked_name(name),
        b"",
        b"",
        limits=KeyLimits(rpm, concurrent, tpm),
        priority=cast("Priority", priority),
        models=() if models is None else checked_models(models),
    )
    api_key = with_rights(named, rights)
    if api_key.models and not api_key.infers:
        raise UsageInvalid(
            f"--rights {rights} and --models exclude each other: only a key for inference uses models.",
            remedy="Leave --models out, or add inference to --rights.",
        )
    if api_key.limits and not api_key.infers:
        raise UsageInvalid(
            f"--rights {rights} and a limit exclude each other: limits apply to requests to models.",
            remedy="Leave the limit out, or add inference to --rights.",
        )
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)

    def add(text: str | None) -> str:
        lines = _lines(text, path)
        if name in (line.key.name for line in lines):
            revoking = f"llamasup key revoke {name}{_option(path)}"
            raise UsageInvalid(
                f"{str(path)!r} already has a key {name!r}.",
                remedy=f"Choose another name, or revoke that key: {revoking}",
            )
        before = _HEADER if text is None else text if text.endswith("\n") or not text else text + "\n"
        return f"{before}{key_line(stored_form(key, _salt(lines) if hashed else None), api_key)}\n"

    is_new = not path.exists()
    change_key_file(path, add)
    _say(view, f"Added the key {name!r} to {path}")
    _say_restarts(view, path)
    if is_new:
        _say(view, f"  → To require it: llamasup run MODEL --api-key-file {shlex.quote(str(path))}")
    if hashed:
        _say(view, "  → Save the key now: the file contains only its hash.")
    shown = {"key": key, "file": str(path), **_facts(api_key, hashed)}
    write_shown(shown, key, json=json)


@commands.command("list")
@guarded
def list_(view: View, file: File = None, json: o.Json = False) -> None:
    """List the names, rights and limits of the keys."""
    path = _path(file)
    text = key_file_text(path)
    lines = _lines(text, path)
    if json:
        keys = [{"line": line.number, **_facts(line.key, line.hashed)} for line in lines]
        write_json({"file": str(path), "keys": keys})
    elif lines:
        write_result(table([_HEADINGS, *map(_row, lines)], indent=""))
    if text is None:
        _say(view, f"{path} does not exist.")
    elif not lines:
        _say(view, f"{path} contains no keys.")


@commands.command()
@guarded
def revoke(view: View, name: Name, file: File = None, json: o.Json = False) -> None:
    """Remove a key from the file.

    A running llamasup refuses the key within a second.
    """
    path = _path(file)
    was_last = False

    def remove(text: str | None) -> str:
        nonlocal was_last
        lines = _lines(text, path)
        found = next((line for line in lines if line.key.name == name), None)
        if found is None or text is None:
            raise _unknown(name, [line.key.name for line in lines], path)
        was_last = len(lines) == 1
        return without_line(text, found.number)

    change_key_file(path, remove)
    _say(view, f"Removed the key {name!r} from {path}")
    _say_restarts(view, path)
    if was_last:
        _say(
            view,
            "  → This was the last key: with this file, every request is refused and no service starts.",
        )
    if json:
        write_json({"name": name, "file": str(path), "revoked": True})


def _say_restarts(view: View, path: Path, units: Path = Path("/etc/systemd/system")) -> None:
    """Name the services to restart: a system service gets a copy of the file when it starts."""
    wanted = f":{str(path.resolve()).replace('%', '%%')}"
    for unit in sorted(units.glob("llamasup*.service")):
        with suppress(OSError, UnicodeDecodeError):
            lines = unit.read_text("utf-8").splitlines()
            if any(line.startswith("LoadCredential=") and line.endswith(wanted) for line in lines):
                _say(view, f"  → {unit.stem} reads the file when it starts: systemctl restart {unit.stem}")


_HEADINGS = ("NAME", "RIGHTS", "RPM", "CONCURRENT", "TPM", "PRIORITY", "MODELS", "HASHED")


def _row(line: KeyLine) -> Sequence[str]:
    facts = _facts(line.key, line.hashed)
    return [
        facts["name"],
        ",".join(facts["rights"]),
        *("-" if facts[limit] is None else str(facts[limit]) for limit in ("rpm", "concurrent", "tpm")),
        facts["priority"],
        ",".join(facts["models"]) or "all",
        "yes" if facts["hashed"] else "no",
    ]


def _facts(key: ApiKey, hashed: bool) -> dict[str, Any]:
    return {
        "name": key.name,
        "rights": list(key.rights),
        "rpm": key.limits.requests_per_minute,
        "concurrent": key.limits.concurrent,
        "tpm": key.limits.tokens_per_minute,
        "priority": key.priority,
        "models": list(key.models),
        "hashed": hashed,
    }


def _lines(text: str | None, path: Path) -> tuple[KeyLine, ...]:
    return () if text is None else read_key_lines(text, str(path), salt=PROCESS_SALT)


def _salt(lines: Sequence[KeyLine]) -> str:
    """Return the salt of the file's hashed keys, or a new one: each salt costs one more hash per request."""
    salts = [line.key.salt.decode() for line in lines if line.hashed]
    return salts[0] if salts else secrets.token_hex(_SALT_BYTES)


def _unknown(name: str, known: Sequence[str], path: Path) -> UsageInvalid:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        remedy = one_of_these(map(repr, near))
    elif known:
        remedy = f"List the keys with `llamasup key list{_option(path)}`."
    else:
        remedy = "The file contains no keys."
    return UsageInvalid(f"{str(path)!r} has no key {name[:64]!r}.", remedy=remedy)


def _option(path: Path) -> str:
    """Return the option of a command for this file; empty for the default file."""
    return "" if path == default_key_file() else f" --file {shlex.quote(str(path))}"


def _path(file: Path | None) -> Path:
    return default_key_file() if file is None else expanded(file, UsageInvalid, of="--file")


def _say(view: View, text: str) -> None:
    view.say("info", "key", text)
