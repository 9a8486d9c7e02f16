"""Reads API keys: from a file with one key a line, or from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llamasup.core.errors import ConfigInvalid

__all__ = ["read_api_keys"]

VARIABLE = "LLAMASUP_API_KEY"


def read_api_keys(path: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Every key that opens the door; none means that no key is asked for.

    Blank lines and lines that begin with ``#`` are passed over, as in llama-server's own key file.
    Raises ConfigInvalid: a key file that protects nothing must not go unnoticed.
    """
    keys = [environ[VARIABLE]] if environ.get(VARIABLE) else []
    if path is not None:
        keys += _lines(path)
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            # The key itself is not shown: errors end up in logs.
            raise ConfigInvalid(
                f"An API key of {len(key)} characters holds a character that no HTTP header can carry.",
                remedy="Use letters, digits and punctuation only.",
            )
    return tuple(dict.fromkeys(keys))


def _lines(path: Path) -> list[str]:
    try:
        text = path.expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        match error:
            case OSError():
                reason = error.strerror or str(error)
            case UnicodeDecodeError():
                reason = "it is not UTF-8 text"
            case _:
                reason = "there is no such user"  # ~name
        raise ConfigInvalid(
            f"The API key file {str(path)!r} cannot be read: {reason}.",
            remedy="Give a file with one key a line.",
        ) from error
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigInvalid(
            f"The API key file {str(path)!r} holds no key.",
            remedy="Write one key a line into it, or leave it out.",
        )
    return keys
