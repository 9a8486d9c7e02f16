"""``llamasup key …``: makes, lists and revokes the API keys of a file."""

from __future__ import annotations

import difflib
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from llamasup.auth.key_file import (
    KeyLine,
    checked_models,
    checked_name,
    key_line,
    read_key_lines,
    stored_form,
    without_line,
)
from llamasup.auth.key_source import PROCESS_SALT
from llamasup.auth.key_store import change_key_file, default_key_file, key_file_text
from llamasup.auth.keys import ApiKey, KeyLimits, Priority
from llamasup.cli.errors import guarded
from llamasup.cli.output.layout import table
from llamasup.cli.output.results import write_json, write_result
from llamasup.cli.output.view import View
from llamasup.errors import UsageInvalid

__all__ = ["list_command", "new_command", "revoke_command"]

# With it, a key that was published by mistake is found by what looks for such things.
_PREFIX = "llamasup-"
_KEY_BYTES = 32  # more than anybody can try, so that a fast hash of it is a safe one
_SALT_BYTES = 16
_HEADER = "# API keys of llamasup, one a line: docs/api-keys.md says what may stand behind a key.\n"


def new_command(
    name: str,
    file: Path | None,
    *,
    rights: str,
    rpm: int | None,
    concurrent: int | None,
    tpm: int | None,
    priority: str,
    models: str | None,
    hashed: bool,
    json: bool,
) -> int:
    """Make a key and print it. Returns the exit code, as all of these do."""

    def act(view: View) -> None:
        path = _path(file)
        said = ApiKey(
            checked_name(name),
            b"",
            b"",
            infers="inference" in rights,
            controls="control" in rights,
            limits=KeyLimits(rpm, concurrent, tpm),
            priority=cast("Priority", priority),
            models=() if models is None else checked_models(models),
        )
        if said.models and not said.infers:
            raise UsageInvalid(
                f"--rights {rights} and --models: a key that may not infer uses no model.",
                remedy="Leave --models out, or add inference to --rights.",
            )
        if said.limits and not said.infers:
            raise UsageInvalid(
                f"--rights {rights} and a limit: limits are for requests to the model.",
                remedy="Leave the limit out, or add inference to --rights.",
            )
        key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)

        def add(text: str | None) -> str:
            lines = _lines(text, path)
            if name in (line.key.name for line in lines):
                raise UsageInvalid(
                    f"{str(path)!r} has a key {name!r} already.",
                    remedy=f"Choose another name, or revoke that one: llamasup key revoke {name}",
                )
            before = _HEADER if text is None else text if text.endswith("\n") or not text else text + "\n"
            return f"{before}{key_line(stored_form(key, _salt(lines) if hashed else None), said)}\n"

        is_new = not path.exists()
        change_key_file(path, add)
        _say(view, f"Added the key {name!r} to {path}")
        if is_new:
            _say(view, f"  → To ask for it: llamasup run MODEL --api-key-file {shlex.quote(str(path))}")
        if hashed:
            _say(view, "  → Keep it now: the file has only its hash.")
        if json:
            write_json({"key": key, "file": str(path), **_facts(said, hashed)})
        else:
            write_result(key)

    return guarded(act)


def list_command(file: Path | None, *, json: bool) -> int:
    """Show names, rights and limits; never a key."""

    def act(view: View) -> None:
        path = _path(file)
        text = key_file_text(path)
        lines = _lines(text, path)
        if json:
            keys = [{"line": line.number, **_facts(line.key, line.hashed)} for line in lines]
            write_json({"file": str(path), "keys": keys})
        elif lines:
            write_result(table([_HEADINGS, *map(_row, lines)], indent=""))
        if text is None:
            _say(view, f"There is no {path}.")
        elif not lines:
            _say(view, f"{path} holds no key.")

    return guarded(act)


def revoke_command(name: str, file: Path | None, *, json: bool) -> int:
    """Remove a key; all other lines stay as they are."""

    def act(view: View) -> None:
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
        if was_last:
            _say(
                view,
                "  → It was the last: a service with this file lets nobody in by it, and none starts.",
            )
        if json:
            write_json({"name": name, "file": str(path), "revoked": True})

    return guarded(act)


_HEADINGS = ("NAME", "RIGHTS", "RPM", "CONCURRENT", "TPM", "PRIORITY", "MODELS", "HASHED")


def _row(line: KeyLine) -> Sequence[str]:
    facts = _facts(line.key, line.hashed)
    return [
        facts["name"],
        ",".join(facts["rights"]),
        *("-" if facts[each] is None else str(facts[each]) for each in ("rpm", "concurrent", "tpm")),
        facts["priority"],
        ",".join(facts["models"]) or "all",
        "yes" if facts["hashed"] else "no",
    ]


def _facts(key: ApiKey, hashed: bool) -> dict[str, Any]:
    return {
        "name": key.name,
        "rights": [right for right, has in (("inference", key.infers), ("control", key.controls)) if has],
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
    """That of the file, if it has one: each further salt costs every request a hash."""
    salts = [line.key.salt.decode() for line in lines if line.hashed]
    return salts[0] if salts else secrets.token_hex(_SALT_BYTES)


def _unknown(name: str, known: Sequence[str], path: Path) -> UsageInvalid:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        remedy = f"The nearest is {near[0]!r}."
    elif known:
        remedy = "llamasup key list shows what there is."
    else:
        remedy = "It holds no key at all."
    return UsageInvalid(f"{str(path)!r} has no key {name[:64]!r}.", remedy=remedy)


def _path(file: Path | None) -> Path:
    if file is None:
        return default_key_file()
    try:
        return file.expanduser().absolute()
    except RuntimeError as error:  # ~name
        raise UsageInvalid(f"--file {str(file)!r}: there is no such user.") from error


def _say(view: View, text: str) -> None:
    view.say("info", "key", text)
