"""The key that a command shows to a llamasup elsewhere: of a server's file of keys, or of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llamasup.core.errors import ConfigInvalid
from llamasup.core.key_file import read_key_lines
from llamasup.core.keys import digest_of
from llamasup.effects.keys import PROCESS_SALT, environment_keys, read_text

__all__ = ["client_key"]


def client_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """The first key of the file that may control, or else its only one. None: there is no key at all.

    Raises ConfigInvalid for a file that has none that can be sent.
    """
    if path is None:
        return next(iter(environment_keys(environ)), None)
    text, _ = read_text(path)
    plain = [line for line in read_key_lines(text, str(path), salt=PROCESS_SALT) if not line.hashed]
    chosen = next((line for line in plain if line.key.controls), plain[0] if len(plain) == 1 else None)
    if chosen is None:
        raise ConfigInvalid(
            f"The API key file {str(path)!r} holds no key that may control and is not hashed.",
            remedy="Make one: llamasup key new NAME --rights control; or keep just the key in a file.",
        )
    line = text.removeprefix("\ufeff").split("\n")[chosen.number - 1].strip("\r \t")
    word = line.split(None, 1)[0]
    # A line without attributes is a key as a whole, blanks and all.
    return word if digest_of(PROCESS_SALT, word.encode()) == chosen.key.digest else line
